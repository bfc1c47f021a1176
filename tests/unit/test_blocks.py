"""Which modules of a model are its repeated blocks."""

from torch import nn

from accel_fn._blocks import find_blocks


class Block(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, inputs):
        return self.layer(inputs)


class Other(Block):
    pass


def test_blocks_are_the_modules_of_one_class_in_a_list_in_their_order():
    blocks = [Block(), Block(), Block()]
    model = nn.ModuleDict({"embed": nn.Linear(2, 2), "blocks": nn.ModuleList(blocks)})
    assert find_blocks(model) == blocks


def test_blocks_may_stand_in_a_sequential_and_in_several_places():
    first, second = nn.Sequential(Block(), nn.ReLU()), nn.ModuleList([Block(), Block()])
    found = find_blocks(nn.ModuleList([first, nn.ModuleList([second])]))
    assert found == [first[0], *second]


def test_most_frequent_class_wins():
    blocks = [Block(), Other(), Other(), Block(), Block()]
    assert find_blocks(nn.ModuleList(blocks)) == [blocks[0], blocks[3], blocks[4]]


def test_of_classes_as_frequent_the_larger_wins():
    large = [Other(8), Other(8)]
    assert find_blocks(nn.ModuleList([Block(), Block(), *large])) == large


def test_layers_without_children_are_no_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


def test_a_block_without_parameters_is_none():
    assert find_blocks(nn.Sequential(*[nn.Sequential(nn.ReLU()) for _ in range(3)])) == []


def test_a_single_block_is_not_repeated():
    assert find_blocks(nn.ModuleList([Block(), Other()])) == []


def test_a_shared_block_counts_once():
    shared, other = Block(), Block()
    assert find_blocks(nn.ModuleList([shared, other, shared])) == [shared, other]


def test_blocks_of_a_transformer_are_its_layers():
    layer = nn.TransformerEncoderLayer(4, 1, 8)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert find_blocks(model) == list(model.layers)
