"""The chaos campaign: a real server with every serving mode, under load, while things go wrong.

A run draws *actions* from a seed (`schedule`): processes are killed or stopped, handlers hang and
crash, engines fail, clients dawdle and leave, models change, archives lie, the disk is full,
descriptors run out, the wall clock jumps. Meanwhile clients with unique payloads send requests over
HTTP and gRPC (`clients`, `grpc_clients`), to models of all kinds, a workflow and an engine, and
dashboards and scrapers read (`operators`); a referee judges every outcome by what is allowed at
that moment (`rules`, `timeline`). In the end everything must recover, and nothing may be left
(`leftovers`). With an odd seed the server has its models in a catalog, which an action edits; with
an even one it writes snapshots.

    make chaos                                                  ten minutes, of a random seed
    pytest tests/chaos --chaos-seed 7 --chaos-seconds 120       the actions of seed 7 again

The seed decides which actions come in which order, with which choices and pauses. It does not
decide how the threads, processes and packets of a run meet: a failure may need several replays.
`soak` is the opposite: hours of ordinary traffic, and a table of what grows.
"""
