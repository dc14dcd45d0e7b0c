"""One file per alert rule."""
