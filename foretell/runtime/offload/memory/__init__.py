"""Where offloaded bytes lie: `arena` and `slots` in host memory, `disk` and `stage` on disk, `store` knows which is where."""
