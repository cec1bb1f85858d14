"""``marserve doctor --compare OLD NEW``: sends the same requests to two servers and compares.

`requests` reads the requests, `exchange` sends one, and `pairs` sends all to both servers.
`answers` and `bodies` compare the responses, `latency` compares times, `report` prints the result.
"""
