"""Traces and answers on disk: `file` is the format, `check` what a file must hold, `cache` the folder, `traces` makes what is not there."""
