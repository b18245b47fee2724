"""A run that goes on after faults, without anybody there. No torch but in `standby`.

    keep ──► Launcher.attempt ──► ended ──► fault_of: which restarts?  ──► budget: still one, and after what pause?
      ▲      ranks, from `standby`                                              │
      └───────────────────────── resume, from the newest checkpoint that is whole ◄┘

`keep` is for the ranks of `foretell run`, `command` for any other command, `faults` names what happened and says what a restart
may mend, `budget` how often and how soon, `notices` tells that the machine is about to be taken away, `standby` is a process that
has imported torch already and is forked for ranks, `reaper` takes in whoever lost its parent.
"""
