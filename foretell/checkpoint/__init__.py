"""Checkpoints: what every rank wrote, as boxes of whole tensors; found damaged before anything is loaded.

    boxes     which part of a whole tensor a rank has                    no torch
    format    manifest and headers, read with distrust                   no torch
    about     what a manifest says of plan, data and optimizer, checked   no torch
    store     folders of checkpoints: find, check every byte, keep N     no torch
    interval  how often to save                                          no torch
    tree      what only one rank has: nested values with tensors in them
    write     one rank's file
    saver     all ranks' files into one checkpoint, while training goes on
    read      any boxes out of any checkpoint
    pretrained, convert   weights in and out as safetensors
"""
