"""A backend of functions: `Trainer(backend="more_mlx.addresses.Addresses")`."""

import os


class Addresses:
    """Sets `MACHINES` for libraries that connect by a list of addresses, as LightGBM does."""

    def setup(self, addresses, topology):
        os.environ["MACHINES"] = ",".join(addresses)

    def teardown(self):
        del os.environ["MACHINES"]

    def lost_peer(self, error):
        return isinstance(error, ConnectionError)
