"""A handler that cannot be served: two classes, and imports that nobody has."""

import no_such_package_of_anybody
from ts.handler_utils.distributed.pt_pippy import get_pipeline_driver
from ts.torch_handler.base_handler import BaseHandler, NoSuchName
from ts.torch_handler.unknown_handler import Unknown

try:
    import another_that_may_be_missing
except ImportError:
    another_that_may_be_missing = None


class Helper(Unknown):
    """Belongs into another file."""

    driver = get_pipeline_driver
    name = NoSuchName


class Detector(BaseHandler):
    """The handler that was meant."""

    packages = (no_such_package_of_anybody, another_that_may_be_missing)
