"""Object stores: S3, Google Cloud Storage, Azure and HDFS, through pyarrow."""
