"""Probes that people share: one small file with what was measured, checked when it is written and again when it is added.

    probe ──► Measured ──► pack, file ──► X.foretell.json.gz ──► file, check ──► added (kept in the user's cache)
                                                                                  │
                             find_profile ◄── profile of all files of a device ◄──┘  combine, then fitted as a probe is

    file      what a shared file holds, its bytes and its digest; reading one that may be damaged or made to harm
    check     what no device can do, what is missing, what contradicts the catalogue
    combine   several files of one device: the middle of each row, and how far the files differ
    added     where added files are kept, and the devices they describe

A file holds no host name, user, path, serial number or UUID: its texts are few, and of a narrow alphabet. See docs/share.md.
"""
