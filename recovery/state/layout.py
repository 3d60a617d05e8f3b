"""What must agree between two workers before any byte of state moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from protos.recovery.v1 import manifest_pb2
from recovery.state.manifest import PART_CLASSES
from recovery.state.part import Part
from recovery.state.tensors_part import add_tensors


def build_layout(
    parts: Sequence[Part], live: Mapping[str, Tensor], fragments: Mapping[str, Sequence[str]]
) -> manifest_pb2.Layout:
    """Return the layout of a worker.

    Args:
        parts: In the order of registration.
        live: The live module's parameters by name, tied ones under each of their names; their dtypes decide what
            outer parameters become when they are copied there.
        fragments: Names of the parameters of each fragment.
    """
    layout = manifest_pb2.Layout()
    for part in parts:
        layout.parts.append(manifest_pb2.LayoutPart(name=part.name, part_class=PART_CLASSES[part.part_class]))
        part.add_layout(layout)
    add_tensors(layout, "live", live)
    for name, parameters in fragments.items():
        layout.fragments.append(manifest_pb2.LayoutFragment(name=name, parameters=parameters))
    return layout
