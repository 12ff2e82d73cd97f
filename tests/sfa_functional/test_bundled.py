"""What ships in the package: the texts do not overlap, the checkpoint is small and reads as any other."""

import torch

import sfa_functional as sfa
from sfa_functional.bundled import TINY_CHECKPOINT, held_out_text, training_text
from weights import check_layers, load_layer, open_checkpoint


def folded(text):
    return {" ".join(p.split()) for p in text.split("\n\n") if len(p) > 60}


def test_training_text_holds_no_held_out_paragraph():
    held_out, training = held_out_text(), training_text()
    assert len(held_out) > 16 * 512
    assert len(training) > 1_000_000
    assert len(folded(held_out)) > 50
    assert not folded(held_out) & folded(training)
    sentence = "The order in which attributes are defined in the class body is"  # topic "class"; "compound" quotes it
    assert sentence in " ".join(held_out.split())
    assert sentence not in " ".join(training.split())


def test_texts_are_the_same_every_time():
    assert held_out_text() == held_out_text()


def test_the_checkpoint_is_small_and_complete():
    files = [file for file in TINY_CHECKPOINT.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 4_000_000
    checkpoint = open_checkpoint(TINY_CHECKPOINT)
    config = sfa.SFAConfig.from_hf(checkpoint.config)
    check_layers(checkpoint, config)
    assert config.num_layers == 4
    assert config.max_position_embeddings == 512
    params = load_layer(checkpoint, 3, config=config)
    assert all(bool(torch.isfinite(x).all()) for x in vars(params).values() if isinstance(x, torch.Tensor))
