c = get_config()  # type: ignore[name-defined]  # noqa: F821
c.LanguageServerManager.autodetect = False  # it lists a dozen language servers that are not installed
c.ServerApp.tornado_settings = {"ws_ping_timeout": 30_000}  # its own default is longer than it takes, and warns of that
