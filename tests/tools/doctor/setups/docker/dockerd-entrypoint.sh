#!/bin/bash
set -e
if [[ "$1" = "serve" ]]; then
    torchserve --start --ts-config /home/model-server/config.properties --disable-token-auth
else
    eval "$@"
fi
# The container shall not end.
tail -f /dev/null
