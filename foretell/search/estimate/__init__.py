"""Quick costs of plans: the same lowering, timeline and allocator as any plan's, on a `short` stack of merged ops (`coarse`), made deep (`depth`)."""
