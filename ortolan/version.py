"""The version: the package's, the distribution's and the operator library's."""

__version__ = "0.1.0"
