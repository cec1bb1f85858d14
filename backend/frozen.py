"""Imported by the fork server when it has imported all else: what is there now is there to stay.

Workers share the memory of the fork server for as long as nobody writes to it. The collector
writes to every object that it looks at, and a worker's first full collection made 60 MB of torch's
and torchvision's modules its own. Frozen objects it does not look at.

An import, because that is all a fork server does before it forks. By its own account
(`gc.freeze`), the collector is to run before, so that no garbage is kept.
"""

import gc

gc.collect()
gc.freeze()
