"""Create objects on S3 only if they do not exist yet, which pyarrow cannot do."""

import urllib.parse

from mlx_runtime.errors import StorageError


def put_new(root: str, region: str, path: str, data: bytes) -> bool:
    """Put an object with `If-None-Match: *`. Return False if it exists.

    Args:
        root: URI of the storage, whose options name the server.
        region: Region of the bucket.
        path: Bucket and key.
        data: Content of the object.

    Raises:
        OSError: The storage does not answer.
        StorageError: It does not implement the condition.
    """
    import botocore.config
    import botocore.exceptions
    import botocore.session

    options = dict(urllib.parse.parse_qsl(root.partition("?")[2]))
    endpoint = options.get("endpoint_override")
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    bucket, _, key = path.partition("/")
    style = {"addressing_style": "path"} if endpoint else {}
    try:
        client = botocore.session.get_session().create_client(
            "s3", region_name=region, endpoint_url=endpoint, config=botocore.config.Config(s3=style)
        )
        client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
    except botocore.exceptions.ClientError as error:
        code = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if code in (409, 412):  # another writer is creating it, or has created it
            return False
        if code == 501:
            raise StorageError(f"{root} does not implement If-None-Match of S3's PutObject") from error
        raise OSError(str(error)) from error
    except botocore.exceptions.BotoCoreError as error:
        raise OSError(str(error)) from error
    return True
