"""Processes: `launch` starts them, `supervise` starts them again after faults, `watch` and `blame` say who holds a run up,
`whose_error` whose an exception is, `control` and `secure` carry words between them, `guardian` and `lock` outlive kills, `pool` keeps
them warm."""
