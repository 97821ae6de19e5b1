"""Where student code runs: a sandboxed process that is handed calls and hands back values, never a verdict."""
