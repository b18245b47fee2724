"""Pipeline parallelism: `stages` runs PyTorch's schedules, `part` is one stage of the user's module, `dry_run` a rank without the others."""
