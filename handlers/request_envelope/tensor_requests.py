"""What the answer to a request of the Open Inference Protocol depends on."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TensorRequest:
    """What an answer needs to know of its request.

    Attributes:
        id: The one it gave itself, None without one.
        inputs: Names of its inputs.
        outputs: Names of the outputs it asks for, to whether as bytes.
        binary: Whether outputs that it does not name go as bytes.
    """

    id: Any = None
    inputs: list[str] = field(default_factory=list)
    outputs: dict[str, bool] = field(default_factory=dict)
    binary: bool = False

    @classmethod
    def of(cls, body: dict[str, Any]) -> "TensorRequest":
        """What the JSON of a request says.

        Raises:
            KeyError, TypeError: It is not in the format.
        """
        id_ = body.get("id")
        binary = bool((body.get("parameters") or {}).get("binary_data_output"))
        return cls(
            id=id_ if id_ is not None and str(id_).strip() else None,
            inputs=[tensor["name"] for tensor in body["inputs"]],
            outputs={
                tensor["name"]: bool((tensor.get("parameters") or {}).get("binary_data", binary))
                for tensor in body.get("outputs") or ()
            },
            binary=binary,
        )

    def outputs_of(self, results: Any) -> list[tuple[str, Any, bool]]:
        """Give each result that was asked for its name, and say whether it goes as bytes.

        Raises:
            IndexError: No outputs are asked for, and there are more results than inputs.
        """
        if not self.outputs:
            return [(self.inputs[i], result, self.binary) for i, result in enumerate(results)]
        names = list(self.outputs)
        if self.outputs.keys() <= set(self.inputs):
            names = self.inputs
        by_name = dict(zip(names, results, strict=False))
        return [(name, by_name[name], raw) for name, raw in self.outputs.items() if name in by_name]
