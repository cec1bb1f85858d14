"""``marserve doctor --compare OLD NEW``: sends the same requests to two servers and compares.

What is sent is in `requests`, how in `exchange`, and when in `pairs`; what is compared of two
answers is in `answers` and `bodies`, of their times in `latency`, and `report` tells it.
"""
