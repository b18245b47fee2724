"""Processes: `launch` starts them, `watch` and `blame` say who holds a run up, `whose_error` whose an exception is,
`guardian` and `lock` outlive kills, `pool` keeps them warm."""
