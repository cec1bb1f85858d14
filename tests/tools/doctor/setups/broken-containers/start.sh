#!/bin/bash
pip install marserve
torchserve --start --model-store /models --ts-config /config.properties
tail -f /dev/null
