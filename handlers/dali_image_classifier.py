"""`image_classifier` with NVIDIA's DALI in place of torchvision's transforms."""

from marserve.handlers.engines.dali import DALIHandler
from marserve.handlers.image_classifier import ImageClassifier


class DALIImageClassifier(DALIHandler):
    """Answers every image with its most probable classes, the best first."""

    topk = ImageClassifier.topk
    set_max_result_classes = ImageClassifier.set_max_result_classes
    get_max_result_classes = ImageClassifier.get_max_result_classes
    postprocess = ImageClassifier.postprocess
