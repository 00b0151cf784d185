# SPDX-License-Identifier: MIT
"""Tests of bake.py on some 60 families of models: each is baked as the per-sample loop would, or it
is refused. And on bases in half precision and 4-bit, and on models of the hub.
"""
import argparse
import http.server
import json
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from torch.testing import assert_close

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bake
from bake import Prefix
from test_bake import (FAMILIES, SIZE, chat_for, command, fill_targets, folders, loaded, loop_kl,
                       lora, make_examples, make_model, parse, prefix_of, refused, trained, write)

FAMILIES |= {
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 8},
    "Cohere": {"logit_scale": 0.5},
    "Granite": {"logits_scaling": 0.5},
    "HyperCLOVAX": {"logits_scaling": 0.5},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0, "sliding_window": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2,
               "chunk_size": 8},
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
                 "mamba_chunk_size": 8},
}
PLAIN_FAMILIES = """Apertus Arcee BioGpt BitNet Bloom Cohere2 Cwm DiffLlama Doge Ernie4_5
    Exaone4 FlexOlmo Gemma Glm Glm4 GptOss Llama4Text Mixtral Moshi Mpt Nemotron Olmo2 Olmo3
    Phi Phi3 Phimoe SeedOss SmolLM3 StableLm Starcoder2 XGLM""".split()
FAMILIES |= dict.fromkeys(PLAIN_FAMILIES, {"head_dim": 8})
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
HYBRID = {"head_dim": 8, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
FAMILIES |= dict.fromkeys("Lfm2 MiniMax OlmoHybrid Qwen3Moe Qwen3Next Qwen3_5Text "
                          "RecurrentGemma".split(), HYBRID)
FAMILIES |= {
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "Bart": {"decoder_layers": 2, "d_model": 32, "decoder_ffn_dim": 64},
    "DeepseekV4": HYBRID | {"n_routed_experts": 4, "n_shared_experts": 1, "q_lora_rank": 8},
    "GraniteMoeHybrid": MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 4,
                                 "shared_intermediate_size": 16},
    "Falcon": {},
    "Gemma3": {"text_config": SIZE | {"head_dim": 8}, "mm_tokens_per_image": 4,
               "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "patch_size": 14,
                                 "num_attention_heads": 4, "intermediate_size": 64,
                                 "image_size": 28}},
    "Jamba": HYBRID | {"attn_layer_offset": 1, "attn_layer_period": 2},
    "Mamba": {"state_size": 8},
}
BIDIRECTIONAL = {"Gemma3Text": {"head_dim": 8, "use_bidirectional_attention": True},
                 "Bert": {"is_decoder": False}, "CpmAnt": {}, "XLM": {}}
FAMILIES |= BIDIRECTIONAL
IN_FULL = ["Bamba", "Jamba", "Mamba", "MiniMax", "RecurrentGemma", "Rwkv"]  # read without a cache
UNMASKED = ["Bart", "DeepseekV4", "RecurrentGemma", "Rwkv"]  # padding changes what is sampled
if transformers.__version__.startswith("5.17."):  # where these two are written otherwise
    BIDIRECTIONAL["Doge"] = FAMILIES["Doge"]
    IN_FULL.append("Moshi")

def all_bits(model):
    return {name: t.cpu().numpy().tobytes() for name, t in model.state_dict().items()}

@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - BIDIRECTIONAL.keys()))
def test_laws_7_and_8_families(folders, family, tmp_path, capsys):
    """Prefix-cached is uncached, for targets and sampling; training moves LoRA and no other bit."""
    model, head, args = loaded(folders(family))
    examples = make_examples([(9, 4, 5), (3, 9, 12), (6, 2, 1)], shared=12)
    prefix = prefix_of(model, examples)
    assert prefix.length == (0 if family in IN_FULL else 12)
    assert ("are read in full" in capsys.readouterr().out) == (family in IN_FULL)
    plain = fill_targets(model, examples, tmp_path, Prefix())
    fill_targets(model, examples, tmp_path, prefix)
    cached = fill_targets(model, examples, tmp_path, prefix)  # its use has not changed the cache
    assert_close(cached, plain, atol=1e-4, rtol=1e-4)
    kl = bake.batch_kl(model, head, examples)
    assert_close(kl, loop_kl(model, examples), atol=1e-5, rtol=1e-4)
    grads = torch.autograd.grad(kl.sum(), lora(model), allow_unused=True)
    used = {id(param) for param, grad in zip(lora(model), grads) if grad is not None and grad.any()}
    assert len(used) >= 4
    chat = chat_for(folders(family))
    prompts = [e.teacher_prompt for e in examples]
    with bake.teacher_mode(model):
        alone = [bake.generate(model, chat, [p], Prefix(), 8, 0)[0] for p in prompts]
        if family in UNMASKED:
            refused("other logits behind padding", bake.sampling_prefix, model, prompts, prefix)
        else:
            usable = bake.sampling_prefix(model, prompts, prefix)
            behind = bake.full_attention(prefix) and family != "Mpt"
            assert usable.length == (prefix.length if behind else 0)
            assert bake.generate(model, chat, prompts, usable, 8, 0) == alone
    before = all_bits(model)
    trained(model, head, examples, args, tmp_path)
    after = all_bits(model)
    changed = {name for name in before if before[name] != after[name]}
    params = dict(model.named_parameters())
    assert all("lora_" in name for name, param in params.items() if param.requires_grad)
    # What text does not pass through within the decoder, such as a cross-attention, stays 0.
    assert changed == {name for name, param in params.items() if id(param) in used}

def test_lora_keeps_off_what_it_cannot_stand_on(folders, capsys):
    """A vision tower, which no text passes, a router, experts in 3-D: each kind is said once."""
    for family, place, word in [
            ("Gemma3", "model.vision_tower.encoder.layers.*.mlp.fc1", "vision"),
            ("Llama4Text", "model.layers.*.feed_forward.router", "router"),
            ("GptOss", "model.layers.*.mlp.experts.down_proj", "experts")]:
        model, _, _ = loaded(folders(family))
        said = re.search("without LoRA: (.*)", capsys.readouterr().out)[1].split(", ")
        assert place in said and len(said) == len(set(said))
        carry = [name for name, _ in model.named_parameters() if "lora_" in name]
        assert carry and not any(word in name for name in carry)
    model, _, _ = loaded(folders("Qwen3Moe"))  # whose experts PEFT knows
    assert "without" not in capsys.readouterr().out
    assert any("experts.lora_B" in name for name, _ in model.named_parameters())

@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["Llama", "Mamba2"])
def test_half_precision_bases(folders, family, dtype, tmp_path):
    model, head, _ = loaded(folders(family), dtype=dtype)
    examples = make_examples([(3, 4, 2), (1, 9, 7)])
    fill_targets(model, examples, tmp_path)
    kl = bake.batch_kl(model, head, examples)
    for tensor in (kl, *torch.autograd.grad(kl.sum(), lora(model))):
        assert tensor.dtype == torch.float32 and tensor.isfinite().all()
    assert_close(kl, loop_kl(loaded(folders(family))[0], examples), atol=0.1, rtol=0.1)
    prompts = [e.teacher_prompt for e in examples]
    with bake.teacher_mode(model):
        assert bake.first_logits(model, prompts[:1], Prefix()).dtype == model.dtype
        assert bake.sampling_prefix(model, prompts, Prefix()).length == 0

def test_4_bit_bases(tmp_path):
    """The teacher is the quantised model itself: the sides differ in prompt and adapter alone."""
    pytest.importorskip("bitsandbytes")
    folder = make_model(tmp_path / "model", hidden_size=128)  # blocks are of 64 weights
    args = parse(folder, "--dtype", "4bit", "--lr", 1e-2)
    model, head = bake.load_model(args)
    assert model.model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    examples = make_examples([(3, 4, 2), (1, 9, 7)])
    fill_targets(model, examples, tmp_path)
    kl = bake.batch_kl(model, head, examples)
    assert_close(kl, loop_kl(model, examples), atol=0.02, rtol=0.05)
    gradients = []
    for dtype in ("4bit", "float32"):
        other, other_head, _ = loaded(folder, dtype=dtype)
        fill_targets(other, examples, tmp_path)
        kl = bake.batch_kl(other, other_head, examples).sum()
        grads = torch.autograd.grad(kl, lora(other))
        gradients.append(torch.cat([grad.flatten().float() for grad in grads]))
    # Like that of the full weights, as far as the quantised ones are like them.
    assert torch.cosine_similarity(*gradients, dim=0) > 0.8
    fill_targets(model, examples, tmp_path)
    log = trained(model, head, examples, args, tmp_path)
    assert log[-1]["kl"] < 0.9 * log[1]["kl"]

def test_models_that_cannot_be_baked_are_refused(folders, tmp_path, monkeypatch):
    """Above all those whose logits make_head does not know: they would be trained wrongly."""
    model, _, _ = loaded(folders("Gemma2"), "--target-modules", "q_proj,v_proj")
    assert {name.split(".")[-1] for name in model.targeted_module_names} == {"q_proj", "v_proj"}
    for names in ("lm_head,q_proj", "embed_tokens", "nothing_like_it", "self_attn", "q_proj,v_prj",
                  "q_proj,proj"):
        refused("--target-modules", loaded, folders("Gemma2"), "--target-modules", names)
    plain = bake.logits_of
    monkeypatch.setattr(bake, "logits_of", lambda *arguments: plain(*arguments) * 1.001)
    refused("see make_head", loaded, folders("Gemma2"))
    monkeypatch.undo()
    monkeypatch.setattr(bake, "run_trunk", lambda *_: SimpleNamespace(
        last_hidden_state=torch.full((1, 8, 32), torch.inf)))
    refused("states are not finite in torch.float32", loaded, folders())
    monkeypatch.undo()
    for family in BIDIRECTIONAL:
        refused("it is not causal", loaded, folders(family))
    refused(f"--model {tmp_path} to be a causal", loaded, tmp_path)  # an empty folder
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    write(tmp_path / "config.json", json.dumps(code))
    refused("trust_remote_code", loaded, tmp_path)  # own.py is not even looked for

# ----------------------------------------------------------------------------- models on the hub
def test_another_commit_of_a_hub_model_is_another_run(command, folders, tmp_path, monkeypatch):
    """Told by the hub's cache, which is laid out here as after a download."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = tmp_path / "models--someone--tiny"
    (hub / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(folders(), hub / "snapshots" / commit)
    line = command(tmp_path / "out", "--epochs 1 --trajectories 1")
    line[1] = "someone/tiny"
    write(hub / "refs" / "main", "a" * 40)
    assert bake.main(line) == bake.main(line)
    write(hub / "refs" / "main", "b" * 40)
    refused(f"with model_commit '{'a' * 40}', found '{'b' * 40}'", bake.main, line)
    write(hub / "snapshots" / ("b" * 40) / "adapter_config.json", "{}")
    line += ["--out", str(tmp_path / "other")]
    refused("found an adapter in --model someone/tiny: merge it first", bake.main, line)
    line[1] = "someone/else"
    refused("--model someone/else to be a folder, or a model on the hub", bake.main, line)

def test_the_hub_is_asked_for_the_commit(folders, tmp_path, monkeypatch):
    """A server stands in for it. Where none answers, that is said at once."""
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.path == "/api/models/someone/tiny"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(b'{"id": "someone/tiny", "sha": "abc"}')

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    data = str(write(tmp_path / "rows.txt", "Why?"))
    server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint",
                        f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    args = argparse.Namespace(model="someone/tiny", data=data)
    assert bake.identity(args)["model_commit"] == "abc"
    args.model = "someone/else"
    refused("--model someone/else to be .*404 Not Found", bake.identity, args)
    server.shutdown()
    server.server_close()
    start = time.monotonic()
    refused("--model someone/else to be .* HF_HUB_OFFLINE=1.*, found ConnectError: [^\n]*$",
            bake.identity, args)
    assert time.monotonic() - start < 5
