"""Processes: `launch` starts them, `watch` and `judge` say who holds a run up, `guardian` and `lock` outlive kills, `pool` keeps them warm."""
