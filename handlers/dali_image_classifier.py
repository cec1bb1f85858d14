"""`image_classifier` with preprocessing by NVIDIA's DALI."""

from marserve.handlers.engines.dali import DALIHandler
from marserve.handlers.image_classifier import ImageClassifier


class DALIImageClassifier(DALIHandler):
    """Answers each image with its most probable classes, the best first."""

    topk = ImageClassifier.topk
    set_max_result_classes = ImageClassifier.set_max_result_classes
    get_max_result_classes = ImageClassifier.get_max_result_classes
    postprocess = ImageClassifier.postprocess
