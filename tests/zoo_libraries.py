"""The zoo of libraries: all library classes that a default may be an instance of, including those of new versions.

One class with one argument `it`, as in `zoo`, for every module, optimizer and scheduler of torch, every metric of
TorchMetrics, every estimator of scikit-learn, and, if they are installed, models of transformers and torchvision.
"""

import importlib.util
import inspect
import linecache
import re
import sys
import types
import warnings
from collections.abc import Iterator

import torch
import torchmetrics
from sklearn.utils import all_estimators
from torch import nn

ARGUMENTS = {
    "base_lr": "0.1",
    "cutoffs": "[2]",
    "d_model": "8",
    "decoder_layer": "nn.TransformerDecoderLayer(8, 2, 16)",
    "dim": "1",
    "downscale_factor": "2",
    "embed_dim": "8",
    "embedding_dim": "2",
    "encoder_layer": "nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)",
    "gamma": "0.9",
    "groups": "2",
    "hidden_size": "3",
    "in1_features": "2",
    "in2_features": "3",
    "in_channels": "1",
    "in_features": "4",
    "input_size": "2",
    "kernel_size": "2",
    "lr_lambda": "torch.nn.functional.relu",
    "max_lr": "0.2",
    "milestones": "[1, 5]",
    "min_precision": "0.5",
    "min_recall": "0.5",
    "min_sensitivity": "0.5",
    "min_specificity": "0.5",
    "mode": "'LSTM'",
    "module": "nn.Linear(1, 1)",
    "n_classes": "4",
    "nhead": "2",
    "norm_type": "2",
    "normalized_shape": "3",
    "num_channels": "4",
    "num_chunks": "4",
    "num_classes": "3",
    "num_embeddings": "5",
    "num_features": "3",
    "num_groups": "2",
    "num_heads": "2",
    "num_layers": "1",
    "num_outputs": "2",
    "out_channels": "2",
    "out_features": "2",
    "output_size": "3",
    "p": "2",
    "padding": "1",
    "size": "2",
    "step_size": "2",
    "task": "'multiclass', num_classes=3",
    "threshold": "0.1",
    "unflattened_size": "(1, 2)",
    "upscale_factor": "2",
    "value": "2.0",
    "T_0": "3",
    "T_max": "3",
}
"""Source text of each argument without a default."""

METRIC = "torchmetrics.MeanAbsoluteError()"

CALLS = {
    "nn.FractionalMaxPool2d": "2, output_size=3",
    "nn.FractionalMaxPool3d": "2, output_size=3",
    "nn.GRU": "2, 3, num_layers=2, batch_first=True",
    "nn.LSTM": "2, 3, proj_size=1",
    "nn.ModuleDict": "{'a': nn.ReLU(), 'b': nn.LSTM(2, 3)}",
    "nn.ParameterDict": "{'a': torch.ones(2)}",
    "nn.ParameterList": "[torch.ones(2), torch.zeros(1)]",
    "nn.RNN": "2, 3, bidirectional=True",
    "nn.RNNBase": "'GRU', 2, 3",
    "nn.RNNCellBase": "2, 3, True, 4",
    "nn.Transformer": "8, 2, 1, 1, 16, batch_first=True",
    "torch.optim.lr_scheduler.OneCycleLR": "max_lr=0.1, total_steps=5",
    "torch.optim.lr_scheduler.ChainedScheduler": "optimizer=None",
    "torch.optim.lr_scheduler.SequentialLR": "milestones=[1]",
    "torchmetrics.BootStrapper": METRIC,
    "torchmetrics.ClasswiseWrapper": "torchmetrics.Accuracy(task='multiclass', num_classes=2, average=None)",
    "torchmetrics.CriticalSuccessIndex": "0.5",
    "torchmetrics.ExactMatch": "task='multilabel', num_labels=3",
    "torchmetrics.MetricCollection": f"[{METRIC}, torchmetrics.R2Score()]",
    "torchmetrics.MetricTracker": METRIC,
    "torchmetrics.MinMaxMetric": METRIC,
    "torchmetrics.ModifiedPanopticQuality": "{0, 1}, {6, 7}",
    "torchmetrics.MultioutputWrapper": f"{METRIC}, 2",
    "torchmetrics.MultitaskWrapper": f"{{'a': {METRIC}}}",
    "torchmetrics.PanopticQuality": "{0, 1}, {6, 7}",
    "torchmetrics.PermutationInvariantTraining": "torchmetrics.functional.scale_invariant_signal_noise_ratio",
}
"""Source text of all arguments, for classes that need more than the required ones."""

ABSTRACT = {
    "torch.optim.Optimizer",
    "torch.optim.Muon",  # requires matrices, and DUMMY_PARAMS is a vector: annotated without a default
    "torch.optim.lr_scheduler.LRScheduler",
    "torchmetrics.Metric",
}

MORE = [
    "torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))",
    "torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))",
    "np.arange(6.0)",
    "np.random.default_rng(3)",
    "np.random.default_rng()",
    "random.Random(3)",
    "random.Random()",
    "threading.Lock()",
    "collections.defaultdict(list)",
    "sklearn.pipeline.Pipeline([('scale', sklearn.preprocessing.StandardScaler()), ('svc', sklearn.svm.SVC(C=2.0))])",
    "sklearn.model_selection.GridSearchCV(sklearn.svm.SVC(), {'C': [1, 10]})",
    "sklearn.ensemble.VotingClassifier([('a', sklearn.svm.SVC()), ('b', sklearn.tree.DecisionTreeClassifier())])",
]

TRANSFORMERS = [
    f"transformers.{model}(transformers.{config})"
    for model, config in {
        "BertModel": "BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)",
        "GPT2LMHeadModel": "GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)",
        "LlamaForCausalLM": "LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)",
        "T5Model": "T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1, num_heads=2)",
        "ViTModel": "ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=32)",
    }.items()
] + [
    "transformers.BertConfig(num_labels=3)",
    "transformers.AutoModel.from_config(transformers.BertConfig(vocab_size=9, hidden_size=8, num_attention_heads=2))",
    "transformers.BertTokenizerFast(vocab={'[UNK]': 0, '[PAD]': 1, 'a': 2})",
    "tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0, '?': 1}, unk_token='?'))",
    "tokenizers.pre_tokenizers.Whitespace()",
    "functools.partial(transformers.get_linear_schedule_with_warmup, num_warmup_steps=2, num_training_steps=9)",
]
"""Models of all architectures are constructed from a config in the same way; tokenizers are Rust objects."""


TORCHVISION = [
    *(f"torchvision.models.{name}(num_classes=3)" for name in ("resnet18", "mobilenet_v3_small", "squeezenet1_1")),
    *(f"torchvision.models.{name}(num_classes=3)" for name in ("densenet121", "efficientnet_b0", "regnet_y_400mf")),
    "torchvision.models.googlenet(num_classes=3, init_weights=False)",
    "torchvision.models.vision_transformer.VisionTransformer(16, 8, 1, 2, 8, 8)",
    "torchvision.models.swin_transformer.SwinTransformer([2, 2], 8, [1, 1], [2, 2], [2, 2])",
    "torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=2)",
    "torchvision.transforms.Compose([torchvision.transforms.RandomCrop(28), torchvision.transforms.ToTensor()])",
    "torchvision.transforms.v2.Normalize([0.5], [0.25])",
    "torchvision.transforms.v2.RandAugment(magnitude=5)",
    "torchvision.ops.SqueezeExcitation(8, 2)",
]
"""Models without pretrained weights, which a test cannot download, and transforms."""


def _arguments(cls: type) -> str:
    """Return the source text of the required arguments."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [
        item.name
        for item in inspect.signature(cls).parameters.values()
        if item.default is inspect.Parameter.empty and item.kind in named and item.name != "optimizer"
    ]
    return ", ".join(f"{name}={ARGUMENTS[name]}" for name in wanted)


def _calls() -> Iterator[str]:
    for name in nn.modules.__all__:
        yield f"nn.{name}({CALLS.get(f'nn.{name}') or _arguments(getattr(nn.modules, name))})"
    for name in torch.optim.__all__:
        if isinstance(getattr(torch.optim, name), type) and f"torch.optim.{name}" not in ABSTRACT:
            yield f"torch.optim.{name}(DUMMY_PARAMS)"
    for name in torch.optim.lr_scheduler.__all__:
        path, cls = f"torch.optim.lr_scheduler.{name}", getattr(torch.optim.lr_scheduler, name)
        if path not in ABSTRACT:
            yield f"functools.partial({path}, {CALLS.get(path) or _arguments(cls)})"
    for name in torchmetrics.__all__:
        path, cls = f"torchmetrics.{name}", getattr(torchmetrics, name)
        if isinstance(cls, type) and path not in ABSTRACT:
            yield f"{path}({CALLS.get(path) or _arguments(cls)})"
    for _, cls in all_estimators():
        try:
            cls()
        except TypeError:
            continue  # composed of others, as in MORE
        yield f"{cls.__module__}.{cls.__name__}()"
    yield from MORE
    if importlib.util.find_spec("transformers"):
        yield from TRANSFORMERS
    if importlib.util.find_spec("torchvision"):
        yield from TORCHVISION


def _text(calls: dict[str, str]) -> str:
    """Return a module as a user would write it, with one class per call."""
    modules = {module for call in calls.values() for module in re.findall(r"(?<![\w.])((?:[a-z_]\w*\.)+)", call)}
    imports = {f"import {module.rstrip('.')}" for module in modules if not module.startswith(("nn.", "np."))}
    header = ["import numpy as np", *sorted(imports), "from torch import nn", "from mlx_runtime import DUMMY_PARAMS"]
    classes = [f"class {name}:\n    def __init__(self, it={call}): ..." for name, call in calls.items()]
    return "\n".join([*header, "", *classes, ""])


def _made(name: str, text: str) -> types.ModuleType:
    """Create a module from its source, which can be read although there is no file."""
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def kept() -> list[type]:
    """Return one class per default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, or requires another option
        calls = {"Keep_" + re.sub(r"\W+", "_", call).strip("_"): call for call in _calls()}
        module = _made("zoo_of_libraries", _text(calls))
    return [getattr(module, name) for name in calls]
