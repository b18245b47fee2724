"""A rank in a box: one rank's real program of any plan on one device, every other rank replaced by a stand-in.

    plan, rank ─► process group "box" ─► parallel.ranks, parallel.apply, steps as in a run ─► measured: seconds, bytes
                        │
                        └─► each message on its real stream, with its real buffers: so many cores, for as long as the model says

The process group has the plan's world and this rank's number, so meshes, FSDP2, DTensors and pipeline schedules are PyTorch's own.
A stand-in takes the seconds that `price.network.messages` says, has as many thread blocks as NCCL would, and fills what is received with
numbers of the right size. What comes from other stages of a pipeline comes when `simulate.arrivals` says. Numbers are made up, so
losses mean nothing; time, overlap, waiting, memory and the allocator are real.

Start reading with `run`, then `group` (the process group) and `stand_ins` (what a message does on a CPU and on a GPU).
"""
