# Read by each bash that runs a script, because the image names this file in BASH_ENV.
#
# A bash that is the container's first process gets marserve-init before it. So an image derived
# from TorchServe's whose ENTRYPOINT is a script of its own, and a pod whose command is
# "bash -c ...", end with their server and pass signals on, as they are.
if [[ $$ -eq 1 && $- != *s* ]]; then
    # Its options, by name: "pipefail" has no letter.
    options=(-o ${SHELLOPTS//:/ -o })
    if [[ -n "${BASH_EXECUTION_STRING+set}" ]]; then
        options+=(-c "$BASH_EXECUTION_STRING")
    fi
    # By its path: the image may have another PATH.
    exec /home/venv/bin/marserve-init "$BASH" "${options[@]}" "$0" "$@"
fi
