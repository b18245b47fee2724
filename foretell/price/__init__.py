"""One op, collective, copy or launch on one device: seconds, scratch bytes, joules. No plan and no order of events here.

    op ─► kernels/ (features ─► laws, trees; scratch bytes)  ─┐
    collective ─► network/ (links of a group of ranks)       ─┼─► time, speeds ─► simulate
    launch ─► host                                           ─┘

`machine` is what is known of a device and its host: a measured profile, or the catalogue's figures carried over by `analytic`.
`offload` has the speed of what lives elsewhere.
`calibrate` fits a profile from probed rows and learns from runs, `energy` has watts and money. Start with `machine`.
"""
