"""``marserve demo``: a model that is trained, packed, served and called within seconds."""
