"""Block round-robin KV layout for SGLang's decode context parallelism (``--dcp-block-size``)."""

__version__ = "0.1.0"
