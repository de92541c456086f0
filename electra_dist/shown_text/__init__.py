"""Show text of unknown origin: escapes for terminals, logs, Markdown and HTML, and the console of all commands."""
