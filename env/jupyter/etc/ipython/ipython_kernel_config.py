# Kernels say errors only: at each start they warn that loopback is not encrypted.
c = get_config()  # type: ignore[name-defined]  # noqa: F821
c.IPKernelApp.log_level = "ERROR"
