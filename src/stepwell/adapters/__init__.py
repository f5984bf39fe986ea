"""Interfaces of other systems and sources of data, as thin layers over the public names of stepwell."""
