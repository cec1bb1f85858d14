#!/bin/bash
# Runs the command as TorchServe's image does, but without an endless wait at the end: marserve-init,
# the first process, waits for the server.
set -e

if [[ "$1" = "serve" ]]; then
    shift
    # As TorchServe's image: no tokens. docs/platforms/docker.md explains how to use them.
    exec torchserve --foreground --ts-config /home/model-server/config.properties \
        --disable-token-auth "$@"
fi
# Commands come as words, as words with blanks in them, or as a line for the shell.
eval "$*"
