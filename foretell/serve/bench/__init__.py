"""A load generator for OpenAI's interface, on asyncio alone: what a server's clients wait for, and where it is saturated.

    Load ─► requests at their times ─► `client` (one connection each) ─► pieces with their times ─► `figures` ─► `sweep`
                                                                                   `null`: a server that answers at once
"""
