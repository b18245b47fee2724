"""Pipeline parallelism: `cut` divides a step's ops into stages, `order` has the schedules, `part` is a stage with its FSDP2
(`shard`) and its split backward (`halves`), `rank` puts the events of a rank one after the other."""
