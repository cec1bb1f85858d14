#!/bin/bash
set -e
gcloud builds submit --tag europe-docker.pkg.dev/project/models/digits
gcloud ai models upload --container-ports=7080 --container-health-route=/ping \
    --container-predict-route=/predictions/digits --display-name=torchserve-digits \
    --container-image-uri=europe-docker.pkg.dev/project/models/digits
