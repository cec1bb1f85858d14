#!/bin/bash
# What TorchServe's image does with its command, but for the end: it does not wait for ever.
# marserve-init, the first process, waits for the server, whoever starts it and however.
set -e

if [[ "$1" = "serve" ]]; then
    shift
    # As TorchServe's image: no tokens. docs/platforms/docker.md says how to have them.
    exec torchserve --foreground --ts-config /home/model-server/config.properties \
        --disable-token-auth "$@"
fi
# Commands come as words, as words with blanks in them, or as a line for the shell.
eval "$*"
