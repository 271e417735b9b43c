"""``python -m jaxprims bench conv | membound | models``: jaxprims, XLA and PyTorch side by side on this machine's GPU."""
