import importlib
import importlib.metadata
import inspect
import pickle
import re
import subprocess
import sys

import pytest

from marserve.handlers.utils import list_classes_from_module

ALIASES = {
    "ts.context": "marserve.backend.context",
    "ts.handler_utils.distributed.deepspeed": "marserve.handlers.engines.deepspeed",
    "ts.handler_utils.micro_batching": "marserve.handlers.performance.micro_batching",
    "ts.handler_utils.preprocess.dali": "marserve.handlers.engines.dali",
    "ts.handler_utils.timer": "marserve.handlers.timer",
    "ts.metrics.metrics_store": "marserve.backend.metrics",
    "ts.torch_handler.base_handler": "marserve.handlers.base_handler",
    "ts.torch_handler.image_classifier": "marserve.handlers.image_classifier",
    "ts.torch_handler.image_segmenter": "marserve.handlers.image_segmenter",
    "ts.torch_handler.object_detector": "marserve.handlers.object_detector",
    "ts.torch_handler.request_envelope.base": "marserve.handlers.request_envelope.base",
    "ts.torch_handler.request_envelope.json": "marserve.handlers.request_envelope.json",
    "ts.torch_handler.text_classifier": "marserve.handlers.text_classifier",
    "ts.torch_handler.text_handler": "marserve.handlers.text_handler",
    "ts.torch_handler.vision_handler": "marserve.handlers.vision_handler",
    "model_archiver.model_packaging": "marserve.tools.archiver.model_packaging_utils",
}
NAMES = [
    ("ts.context", "Context"),
    ("ts.context", "RequestProcessor"),
    ("ts.handler_utils.distributed.deepspeed", "get_ds_engine"),
    ("ts.handler_utils.hf_batch_streamer", "TextIteratorStreamerBatch"),
    ("ts.handler_utils.micro_batching", "MicroBatching"),
    ("ts.handler_utils.preprocess.dali", "get_dali_pipeline"),
    ("ts.handler_utils.timer", "timed"),
    ("ts.handler_utils.utils", "create_predict_response"),
    ("ts.handler_utils.utils", "import_class"),
    ("ts.handler_utils.utils", "send_intermediate_predict_response"),
    ("ts.llm_launcher", "main"),
    ("ts.metrics.caching_metric", "CachingMetric"),
    ("ts.metrics.dimension", "Dimension"),
    ("ts.metrics.metric", "Metric"),
    ("ts.metrics.metric_cache_abstract", "MetricCacheAbstract"),
    ("ts.metrics.metric_cache_errors", "GeneralMetricsCacheError"),
    ("ts.metrics.metric_cache_errors", "MetricsCacheIOError"),
    ("ts.metrics.metric_cache_errors", "MetricsCacheKeyError"),
    ("ts.metrics.metric_cache_errors", "MetricsCachePyYamlError"),
    ("ts.metrics.metric_cache_errors", "MetricsCacheTypeError"),
    ("ts.metrics.metric_cache_errors", "MetricsCacheValueError"),
    ("ts.metrics.metric_type_enum", "MetricTypes"),
    ("ts.metrics.metric_cache_yaml_impl", "MetricsCacheYamlImpl"),
    ("ts.metrics.metric_collector", "main"),
    ("ts.metrics.metrics_store", "MetricsStore"),
    ("ts.metrics.process_memory_metric", "check_process_mem_usage"),
    ("ts.metrics.process_memory_metric", "get_cpu_usage"),
    ("ts.metrics.system_metrics", "collect_all"),
    ("ts.metrics.unit", "Units"),
    ("ts.model_loader", "ModelLoaderFactory"),
    ("ts.model_service.model_service", "ModelService"),
    ("ts.protocol.otf_message_handler", "create_predict_response"),
    ("ts.protocol.otf_message_handler", "send_intermediate_predict_response"),
    ("ts.service", "PREDICTION_METRIC"),
    ("ts.service", "PredictionException"),
    ("ts.service", "Service"),
    ("ts.service", "create_predict_response"),
    ("ts.service", "emit_metrics"),
    ("ts.torch_handler.base_handler", "BaseHandler"),
    ("ts.torch_handler.base_handler", "PROFILER_AVAILABLE"),
    ("ts.torch_handler.base_handler", "check_valid_pt2_backend"),
    ("ts.torch_handler.base_handler", "setup_ort_session"),
    ("ts.torch_handler.contractions", "CONTRACTION_MAP"),
    ("ts.torch_handler.dali_handler", "DALIHandler"),
    ("ts.torch_handler.dali_image_classifier", "DALIImageClassifier"),
    ("ts.torch_handler.densenet_handler", "DenseNetHandler"),
    ("ts.torch_handler.distributed.base_deepspeed_handler", "BaseDeepSpeedHandler"),
    ("ts.torch_handler.image_classifier", "ImageClassifier"),
    ("ts.torch_handler.image_segmenter", "ImageSegmenter"),
    ("ts.torch_handler.object_detector", "ObjectDetector"),
    ("ts.torch_handler.request_envelope.base", "BaseEnvelope"),
    ("ts.torch_handler.request_envelope.body", "BodyEnvelope"),
    ("ts.torch_handler.request_envelope.json", "JSONEnvelope"),
    ("ts.torch_handler.request_envelope.kserve", "KServeEnvelope"),
    ("ts.torch_handler.request_envelope.kservev2", "KServev2Envelope"),
    ("ts.torch_handler.text_classifier", "TextClassifier"),
    ("ts.torch_handler.text_handler", "TextHandler"),
    ("ts.torch_handler.trt_llm_handler", "TRTLLMHandler"),
    ("ts.torch_handler.unit_tests.test_utils.mock_context", "MockContext"),
    ("ts.torch_handler.unit_tests.test_utils.model_dir", "copy_files"),
    ("ts.torch_handler.unit_tests.test_utils.model_dir", "download_model"),
    ("ts.torch_handler.vision_handler", "VisionHandler"),
    ("ts.torch_handler.vllm_handler", "VLLMHandler"),
    ("ts.utils.hf_utils", "download_model"),
    ("ts.utils.util", "CLEANUP_REGEX"),
    ("ts.utils.util", "PT2Backend"),
    ("ts.utils.util", "PredictionException"),
    ("ts.utils.util", "check_valid_pt2_backend"),
    ("ts.utils.util", "deprecated"),
    ("ts.utils.util", "get_yaml_config"),
    ("ts.utils.util", "list_classes_from_module"),
    ("ts.utils.util", "load_label_mapping"),
    ("ts.utils.util", "map_class_to_label"),
    ("model_archiver", "ModelArchiver"),
    ("model_archiver", "ModelArchiverConfig"),
    ("model_archiver.model_archiver", "ModelArchiver"),
    ("model_archiver.model_archiver_config", "ModelArchiverConfig"),
    ("model_archiver.model_archiver_error", "ModelArchiverError"),
    ("model_archiver", "__version__"),
    ("model_archiver.arg_parser", "ArgParser"),
    ("model_archiver.manifest_components.manifest", "Manifest"),
    ("model_archiver.manifest_components.manifest", "RuntimeType"),
    ("model_archiver.manifest_components.model", "Model"),
    ("model_archiver.model_packaging", "ModelExportUtils"),
    ("model_archiver.model_packaging", "generate_model_archive"),
    ("model_archiver.model_packaging", "package_model"),
    ("model_archiver.model_packaging_utils", "ModelExportUtils"),
    ("model_archiver.version", "__version__"),
    ("workflow_archiver", "__version__"),
    ("workflow_archiver.arg_parser", "ArgParser"),
    ("workflow_archiver.version", "__version__"),
    ("workflow_archiver.workflow_archiver_error", "WorkflowArchiverError"),
    ("workflow_archiver.workflow_packaging", "generate_workflow_archive"),
    ("workflow_archiver.workflow_packaging", "package_workflow"),
    ("workflow_archiver.workflow_packaging_utils", "WorkflowExportUtils"),
]


@pytest.fixture(autouse=True)
def ts():
    return importlib.import_module("ts")


def run(code: str) -> None:
    """Run code in a new interpreter, because the order of imports matters."""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("alias", "real"), ALIASES.items())
def test_an_alias_is_the_same_module(alias, real):
    module = importlib.import_module(alias)
    assert module is importlib.import_module(real)
    assert module.__name__ == module.__spec__.name == real


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_names_that_user_code_imports(module, name):
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    "name",
    ["ts.handler_utils.distributed.pt_pippy", "ts.torch_handler.distributed.base_pippy_handler"],
)
def test_refused_names_have_a_reason(name):
    with pytest.raises(ImportError, match=r"PiPPy .* use torch\.distributed\.pipelining"):
        importlib.import_module(name)


@pytest.mark.parametrize("name", ["handler_utils.timer", "llm_launcher", "version"])
def test_importing_a_name_loads_no_more_than_it_needs(name):
    run(f"import sys, ts.{name}; sys.exit('aiohttp' in sys.modules or 'vllm' in sys.modules)")


@pytest.mark.parametrize("first", ["ts.context", "marserve.backend.context"])
def test_one_module_independent_of_the_order_of_imports(first):
    run(
        f"import ts, {first}, ts.context, marserve.backend.context;"
        "assert ts.context is marserve.backend.context;"
        "assert marserve.backend.context.__spec__.name == 'marserve.backend.context'"
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        item
        for item in NAMES
        if item[0].startswith("ts.torch_handler.") and re.fullmatch("[A-Z][A-Za-z0-9]+", item[1])
    ],
)
def test_the_loader_finds_the_one_class_of_a_handler_or_envelope(module, name):
    found = importlib.import_module(module)
    assert [item.__name__ for item in list_classes_from_module(found)] == [name]


def test_importing_ts_loads_nothing():
    run(
        "import sys, ts;"
        "heavy = {'torch', 'aiohttp', 'yaml', 'marserve.handlers', 'marserve.backend'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )


def test_the_finder_is_the_first(ts):
    run("import sys, ts; assert type(sys.meta_path[0]).__module__ == 'ts'")


def test_dotted_access(ts):
    import ts.utils.util

    assert ts.utils.util.PredictionException.__name__ == "PredictionException"
    assert inspect.ismodule(ts.utils)


def test_classes_pickle_under_either_name():
    dimension = importlib.import_module("ts.metrics.dimension").Dimension("Level", "Model")
    assert pickle.loads(pickle.dumps(dimension)) == dimension
    old = b"cts.metrics.dimension\nDimension\n."  # a reference written under TorchServe
    assert pickle.loads(old) is type(dimension)


def test_an_aliased_module_can_be_reloaded():
    run(
        "import importlib, ts.handler_utils.utils as utils;"
        "assert importlib.reload(utils) is utils;"
        "assert utils.__name__ == 'marserve.handlers.utils'"
    )


@pytest.mark.parametrize(
    "name", ["ts.nowhere", "ts.torch_handler.nowhere", "model_archiver.nowhere"]
)
def test_the_error_names_the_missing_module(name):
    with pytest.raises(ModuleNotFoundError, match=name) as caught:
        importlib.import_module(name)
    assert caught.value.name == name
    assert "marserve" in str(caught.value)


def test_the_version_is_ours(ts):
    version = importlib.import_module("ts.version")
    assert ts.__version__ == version.__version__ == importlib.metadata.version("marserve")
    run("import ts; assert ts.version.__version__ == ts.__version__")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ts.nothing
