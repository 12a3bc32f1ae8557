"""
scaling.py against three witnesses: the papers' formulas, written again as loops over single bands, by way of
the base where the code goes by theta; Hugging Face's values and modules; and what must hold for any formula.
"""
import copy
import json
import math
import pickle

import pytest
import torch

import scaling
from lerope import LeRoPE
from ndrope import NDRoPE
from prope import PRoPE
from rope import RoPE, frequencies
from scaling import extend, from_hf, to_hf

FACTORS = [1 + i / 8 for i in range(32)]                            # a LongRoPE table for d = 64
KEYWORDS = {"linear": {}, "ntk": {}, "dynamic_ntk": {"length": 4096}, "ntk_by_parts": {}, "yarn": {},
            "longrope": {"factors": FACTORS}, "llama3": {}}
every_method = pytest.mark.parametrize("method", KEYWORDS)


def learned(d=64, base=10_000.0):
    """A LeRoPE with alpha up to 3, up and down, so that theta no longer falls with the index."""
    pe, i = LeRoPE(d, base), torch.arange(d // 2)
    with torch.no_grad():
        pe.alpha.copy_(torch.sin(1.3 * i) * i / 10)
    assert (pe.theta().diff() > 0).any()
    return pe


def logit(theta, q, k, m, n):
    """One logit <rho(m) q, rho(n) k> in complex numbers, band by band."""
    half, total = len(q) // 2, 0
    for i, t in enumerate(theta):
        turn = complex(math.cos((m - n) * t), math.sin((m - n) * t))
        total += complex(q[i], q[i + half]) * complex(k[i], -k[i + half]) * turn
    return total.real


def logits(pe, q, k, pos):
    rho = pe(pos)
    return (pe.temperature * rho(q) @ rho(k).transpose(-1, -2)).detach()


# ------------------------------------------------------------------------------------------------------------
# the principle

def test_other_positions_are_other_frequencies():
    torch.manual_seed(0)
    q, k, theta = torch.randn(64).tolist(), torch.randn(64).tolist(), frequencies(64)
    x = torch.tensor([q, k], dtype=torch.float64)
    for to, of in ((lambda m: m / 4, scaling.linear(theta, 4)),     # interpolation
                   (lambda m: 2 * m, 2 * theta)):                   # doubling
        for m, n in ((0, 1), (3, 700), (5000, 40)):
            ours = RoPE(64, theta=of)(torch.tensor([m, n]))(x)
            assert ours[0] @ ours[1] == pytest.approx(logit(theta, q, k, to(m), to(n)), abs=1e-9)


def test_attention_cannot_see_an_offset():
    torch.manual_seed(0)
    x, pos = torch.randn(2, 1, 9, 64, dtype=torch.float64), torch.arange(9)
    for pe in (RoPE(64), extend(learned(), "yarn", 4, 256)):
        at_zero = logits(pe, *x, pos)
        torch.testing.assert_close(logits(pe, *x, pos + 1000), at_zero, rtol=0, atol=1e-10)
        assert (logits(pe, *x, 2 * pos) - at_zero).abs().max() > 0.1


def test_interpolation_is_rope_at_squeezed_positions():
    x, pos = torch.randn(1, 50, 64, dtype=torch.float64), torch.arange(50)
    long = extend(RoPE(64), "linear", 4, 256)
    torch.testing.assert_close(long(4 * pos)(x), RoPE(64)(pos)(x), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------
# the formulas, again, one band at a time

def band(method, t, i, d, s, L):
    """theta' of a single band of frequency t and index i."""
    if method == "linear":
        return t / s
    if method == "longrope":
        return t / FACTORS[i]
    if method in ("ntk", "dynamic_ntk"):
        m = s if method == "ntk" else s * 4096 / L - (s - 1)
        # b' = b m^(d / (d - 2)) for an encoding of base 1: the new spectrum over the old one.
        return t * (m ** (d / (d - 2))) ** (-2 * i / d)
    low, high = (1, 4) if method == "llama3" else (1, 32)
    wavelength = math.inf if t == 0 else 2 * math.pi / abs(t)
    if wavelength < L / high:
        return t
    if wavelength > L / low:
        return t / s
    turns = L / wavelength
    return ((high - turns) * t / s + (turns - low) * t) / (high - low)


@every_method
@pytest.mark.parametrize("pe", [RoPE(64), learned(), PRoPE(64, 0.75), PRoPE(64, 0.5, reverse=True),
                                RoPE(64, theta=-frequencies(64))],
                         ids=["rope", "lerope", "prope", "reversed", "backwards"])
def test_every_method_band_by_band(method, pe):
    for s, L in ((4, 1024), (16, 256), (1.3, 3000.0)):
        ours = extend(pe, method, s, L, **KEYWORDS[method]).theta()
        theirs = [band(method, t, i, 64, s, L) for i, t in enumerate(pe.theta().tolist())]
        assert ours.tolist() == pytest.approx(theirs, rel=1e-12, abs=0)
        assert ours.dtype == torch.float64 and torch.equal(ours == 0, pe.theta() == 0)


def test_the_methods_here_are_all_there_are():
    assert set(KEYWORDS) == set(scaling.METHODS)


def test_identities():
    theta = frequencies(64)
    assert scaling.ntk(theta, 4)[-1] == pytest.approx(scaling.linear(theta, 4)[-1].item(), rel=1e-14)
    assert scaling.ntk(theta, 4)[0] == 1
    for length in (1, 700, 1024):
        assert torch.equal(scaling.dynamic_ntk(theta, 4, length, 1024), theta)
    past = scaling.dynamic_ntk(theta, 4, 4096, 1024)
    torch.testing.assert_close(past, scaling.ntk(theta, 13), rtol=1e-14, atol=0)
    assert torch.equal(extend(RoPE(64), "dynamic_ntk", 4, 1024).theta(), past)      # by default at length s L
    assert scaling.yarn_temperature(4) == pytest.approx(1.1386294361 ** 2, rel=1e-9)


@every_method
def test_s_of_1_is_the_identity_to_the_bit(method):
    for pe in (RoPE(64), learned(), PRoPE(64), RoPE(64, theta=torch.rand(3, 32))):
        same = extend(pe, method, 1, 256, **KEYWORDS[method])
        assert torch.equal(same.theta(), pe.theta()) and same.temperature == 1


def test_s_of_1_in_the_functions_themselves():
    theta = frequencies(64)
    for ours in (scaling.linear(theta, 1), scaling.ntk(theta, 1), scaling.ntk_by_parts(theta, 1, 256),
                 scaling.yarn(theta, 1, 256), scaling.yarn(theta, 1, 256, "index", 1e4),
                 scaling.llama3(theta, 1, 256, 1, 4)):
        assert torch.equal(ours, theta)
    assert scaling.yarn_temperature(1) == 1


# ------------------------------------------------------------------------------------------------------------
# extend

@every_method
def test_extended_logits_are_those_of_the_new_frequencies(method):
    """No method may be parsed and dropped: past the trained length logits change, and to the right ones."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64, dtype=torch.float64).expand(2, 1, 300, 64)
    for pe in (RoPE(64), learned(), PRoPE(64)):
        long = extend(pe, method, 4, 100, **KEYWORDS[method])
        ours, before = (logits(e, q, k, torch.arange(300))[0] for e in (long, pe))
        for m, n in ((299, 0), (150, 20)):
            expected = long.temperature * logit(long.theta().tolist(), q[0, 0], k[0, 0], m, n)
            assert ours[m, n] == pytest.approx(expected, abs=1e-9)
        assert (ours - before)[100:, :100].abs().max() > 0.1


def test_temperature_multiplies_the_logits_alone():
    x, pos = torch.randn(2, 5, 64, dtype=torch.float64), torch.arange(5)
    for method, A in (("yarn", 1.1386294361), ("longrope", 1.0954451150)):
        pe = extend(RoPE(64), method, 4, 1024, **KEYWORDS[method])
        assert pe.temperature == pytest.approx(A ** 2, rel=1e-9)
        torch.testing.assert_close(pe(pos)(x).norm(dim=-1), x.norm(dim=-1))
    for method in KEYWORDS.keys() - {"yarn", "longrope"}:
        assert extend(RoPE(64), method, 4, 1024).temperature == 1
    twice = extend(extend(RoPE(64), "yarn", 2, 256), "yarn", 2, 512)
    assert twice.temperature == pytest.approx((0.1 * math.log(2) + 1) ** 4, rel=1e-12)


def test_the_parameters_are_shared_and_stay_learnable():
    pe, x = learned(), torch.randn(1, 40, 64)
    long = extend(pe, "ntk_by_parts", 4, 100)
    assert [name for name, _ in long.named_parameters()] == ["alpha"] and long.alpha is pe.alpha
    assert long.state_dict().keys() == pe.state_dict().keys()
    long(torch.arange(40))(x)[..., -1, :].sum().backward()
    assert pe.alpha.grad.abs().min() > 0
    with torch.no_grad():
        pe.alpha += 1
    theirs = [band("ntk_by_parts", t, i, 64, 4, 100) for i, t in enumerate(pe.theta().tolist())]
    assert long.theta().tolist() == pytest.approx(theirs, rel=1e-12)


def test_copies_are_independent_and_pickle():
    long = extend(learned(), "yarn", 4, 256)
    before = long.theta().detach()
    for other in (copy.deepcopy(long), pickle.loads(pickle.dumps(long))):
        assert torch.equal(other.theta(), before) and other.temperature == long.temperature
        with torch.no_grad():
            other.alpha += 1
        assert not torch.equal(other.theta(), before) and torch.equal(long.theta(), before)


@every_method
def test_a_spectrum_a_head(method):
    spectra = torch.stack([frequencies(64), learned().theta().detach(), PRoPE(64).theta()])
    x, pos = torch.randn(2, 3, 7, 64), torch.arange(7)
    long = extend(RoPE(64, theta=spectra), method, 4, 256, **KEYWORDS[method])
    for h, theta in enumerate(spectra):
        one = extend(RoPE(64, theta=theta), method, 4, 256, **KEYWORDS[method])
        assert torch.equal(long.theta()[h], one.theta())
        torch.testing.assert_close(long(pos)(x)[:, h], one(pos)(x[:, h]))


@every_method
def test_it_compiles_without_a_break(method):
    long, x = extend(learned(), method, 4, 64, **KEYWORDS[method]), torch.randn(1, 9, 64)
    f = torch.compile(lambda x: long(torch.arange(9))(x), fullgraph=True, backend="eager")
    torch.testing.assert_close(f(x), long(torch.arange(9))(x))


# ------------------------------------------------------------------------------------------------------------
# Hugging Face: values read from transformers 5.24 (head_dim 64, base 1e4, trained length 1024, s = 4), then
# its own code. It computes in float32: base^-x is good to x ln(base) 2^-25, 5e-7 here, and a product or two,
# hence 1e-6. A blend's weight is good to 2^-24, its small end is theta / s: hence s 2^-24 where that is more.

INDEX = [0, 4, 8, 12, 16, 20, 24, 28, 31]                           # of the values; sum of all 32; A
GOLDEN = {
    "default": ([1, .316227764, .100000001, .0316227786, .00999999978, .00316227786, .00100000005,
                 3.16227786e-4, 1.3335215e-4], 3.99790823, 1),
    "linear": ([.25, .079056941, .0250000004, .00790569466, .00249999994, 7.90569466e-4, 2.50000012e-4,
                7.90569466e-5, 3.33380376e-5], .99947706, 1),
    "dynamic": ([1, .227125242, .0515858717, .0117164524, .00266110199, 6.0440338e-4, 1.37275245e-4,
                 3.11786753e-5, 1.02578579e-5], 3.22938021, 1),
    "yarn": ([1, .316227764, .0826923102, .0188520402, .00365384622, 7.90569466e-4, 2.5e-4, 7.90569466e-5,
              3.33380376e-5], 3.83808737, 1.1386294361),
    "llama3": ([1, .316227764, .1, .0316227786, .0040743663, 7.90569466e-4, 2.5e-4, 7.90569466e-5,
                3.33380376e-5], 3.95842135, 1),
}
NTK = [1, .26443249, .0699245483, .0184903238, .00488944259, .00129292754, 3.41892068e-4, 9.04073822e-5,
       3.3338034e-5]


def test_golden_ntk():
    theta = scaling.ntk(frequencies(64), 4)
    assert theta[INDEX].tolist() == pytest.approx(NTK, rel=1e-6)
    assert theta.sum() == pytest.approx(3.53471253, rel=1e-6)


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_values(kind):
    theta, temperature = from_hf({
        "head_dim": 64, "max_position_embeddings": 1024, "rope_theta": 1e4, "rope_scaling": {
            "rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 1024,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, length=4096)
    row, total, A = GOLDEN[kind]
    assert theta[INDEX].tolist() == pytest.approx(row, rel=1e-6)
    assert theta.sum() == pytest.approx(total, rel=1e-6)
    assert temperature == pytest.approx(A ** 2, rel=1e-9)


@pytest.mark.parametrize("p,kept,total", [(0.25, 8, 3.59847726), (0.75, 24, 3.99430975)])
def test_golden_proportional(p, kept, total):
    params = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": p}
    theta, temperature = from_hf({"head_dim": 64, "rope_parameters": params})
    assert (theta != 0).sum() == kept and theta.sum() == pytest.approx(total, rel=1e-6) and temperature == 1


def theirs(kind, length, config):
    """What transformers itself makes of a config: (inv_freq as a list, factor on cos and sin)."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    inv_freq, A = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**copy.deepcopy(config)), "cpu", seq_len=length)
    return inv_freq.tolist(), A


def configs(kind, **more):
    """Head widths, bases, factors and lengths -> (config, present length)."""
    for d, base in ((64, 10_000.0), (128, 500_000.0), (96, 60.0), (40, 1e6)):
        n = d // 2
        tables = {"short_factor": [1 + i / d for i in range(n)], "long_factor": [1.0 + i for i in range(n)]}
        for s, L, lengths in ((4.0, 1024, (17, 4096)), (1.0, 300, (301,)), (2.5, 77, (100,)),
                              (40.0, 4096, (4096, 4097, 163840))):
            params = {"rope_type": kind, "factor": s, "rope_theta": base}
            params |= {"original_max_position_embeddings": L} | more | (tables if kind == "longrope" else {})
            for length in lengths:
                yield {"head_dim": d, "hidden_size": 2 * d, "num_attention_heads": 2,
                       "max_position_embeddings": L, "rope_parameters": params}, length


@pytest.mark.parametrize("kind,more", [
    ("linear", {}), ("linear", {"partial_rotary_factor": 0.5}), ("dynamic", {}),
    ("proportional", {"partial_rotary_factor": 0.3}),
    ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ("llama3", {"low_freq_factor": 2.0, "high_freq_factor": 30.0}), ("longrope", {}),
    ("longrope", {"attention_factor": 1.3}), ("yarn", {}), ("yarn", {"attention_factor": 0.7}),
    ("yarn", {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}), ("yarn", {"mscale": 0.7}),
    ("yarn", {"truncate": False, "beta_fast": 5.0, "beta_slow": 5.0}),
    ("yarn", {"mscale": 1.0, "mscale_all_dim": 0.8})], ids=str)
def test_parity_with_transformers(kind, more):
    for config, length in configs(kind, **more):
        inv_freq, A = theirs(kind, length, config)
        theta, temperature = from_hf(config, length)
        s = config["rope_parameters"]["factor"]
        assert theta.tolist() == pytest.approx(inv_freq, rel=max(1e-6, s * 2 ** -24), abs=0)
        assert temperature == pytest.approx(A ** 2, rel=1e-9)


def test_by_parts_is_their_llama3_with_the_bounds_1_and_32():
    for config, length in configs("llama3", low_freq_factor=1.0, high_freq_factor=32.0):
        params = config["rope_parameters"]
        inv_freq, _ = theirs("llama3", length, config)
        ours = scaling.ntk_by_parts(frequencies(config["head_dim"], params["rope_theta"]), params["factor"],
                                    params["original_max_position_embeddings"])
        assert ours.tolist() == pytest.approx(inv_freq, rel=max(1e-6, params["factor"] * 2 ** -24), abs=0)


# ------------------------------------------------------------------------------------------------------------
# configurations as published, and the module of transformers that reads each

LLAMA_31_8B = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
QWEN_25_7B = {
    "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rope_scaling": {
        "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}
DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
    "rope_theta": 10000, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"}}
# The tables are published as float32 (1.0800000429153442); here to the two decimals that they hold.
PHI_35_MINI = {
    "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
    "rope_scaling": {
        "long_factor": [
            1.08, 1.11, 1.14, 1.34, 1.59, 1.6, 1.62, 2.62, 3.23, 3.23, 4.79, 7.4, 7.7, 9.09, 12.2, 17.67,
            24.46, 28.57, 30.42, 30.84, 32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93, 58.21,
            60.14, 62.61, 62.62, 62.71, 63.14, 63.14, 63.77, 63.93, 63.96, 63.97, 64.03, 64.07, 64.08,
            64.12, 64.41, 64.48, 64.51, 64.53, 64.84],
        "short_factor": [
            1.0, 1.02, 1.03, 1.03, 1.05, 1.05, 1.05, 1.05, 1.05, 1.07, 1.1, 1.11, 1.16, 1.16, 1.17, 1.29,
            1.34, 1.68, 1.79, 1.82, 1.85, 1.88, 1.91, 1.94, 1.99, 2.02, 2.02, 2.02, 2.02, 2.02, 2.02, 2.03,
            2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.08, 2.09, 2.19, 2.22, 2.59, 2.73, 2.75, 2.84],
        "type": "longrope"}}
GEMMA_3_12B = {"model_type": "gemma3", "text_config": {
    "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "num_hidden_layers": 48, "max_position_embeddings": 131072, "rope_local_base_freq": 10000,
    "rope_theta": 1000000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    "sliding_window_pattern": 6}}
GEMMA_4_12B = {"model_type": "gemma4", "text_config": {
    "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "global_head_dim": 512, "num_hidden_layers": 48, "max_position_embeddings": 262144,
    "sliding_window": 1024, "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}}}


def rotary(folder, name, kind, config):
    """The rotary module of a model of transformers, from its published config."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    return getattr(module, f"{name}RotaryEmbedding")(getattr(transformers, kind)(**copy.deepcopy(config)))


def same(ours, inv_freq, A):
    theta, temperature = ours
    assert theta.tolist() == pytest.approx(inv_freq.tolist(), rel=1e-6, abs=0)
    assert temperature == pytest.approx(A ** 2, rel=1e-6)


@pytest.mark.parametrize("names,config,width", [
    (("llama", "Llama", "LlamaConfig"), LLAMA_31_8B, 128),
    (("qwen2", "Qwen2", "Qwen2Config"), QWEN_25_7B, 128),
    (("deepseek_v3", "DeepseekV3", "DeepseekV3Config"), DEEPSEEK_V3, 64)], ids=["llama", "qwen", "deepseek"])
def test_published_configs(names, config, width):
    theirs = rotary(*names, config)
    assert len(theirs.inv_freq) == width // 2
    same(from_hf(config), theirs.inv_freq, theirs.attention_scaling)


def test_published_configs_by_hand():
    """From the formulas: which bands stay, which are divided by the whole factor, and the temperature."""
    (theta, temperature), plain = from_hf(LLAMA_31_8B), frequencies(128, 5e5)
    for t, b in zip(theta.tolist(), plain.tolist()):
        turns = 8192 * b / (2 * math.pi)
        assert (t == b) == (turns >= 4) and (t == b / 8) == (turns <= 1)
    assert temperature == 1
    assert from_hf(QWEN_25_7B)[1] == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    assert from_hf(DEEPSEEK_V3)[1] == 1                             # mscale and mscale_all_dim cancel
    short, long = from_hf(PHI_35_MINI, 4096), from_hf(PHI_35_MINI, 4097)
    assert short[1] == long[1] == pytest.approx(1 + math.log(32) / math.log(4096))
    assert short[0][-1] / long[0][-1] == pytest.approx(64.84 / 2.84)


@pytest.mark.parametrize("length", [100, 4096, 4097, 8000])
def test_published_longrope(length):
    theirs = rotary("phi3", "Phi3", "Phi3Config", PHI_35_MINI)
    theirs(torch.zeros(1), torch.tensor([[length - 1]]))            # the largest position chooses the table
    same(from_hf(PHI_35_MINI, length), theirs.inv_freq, theirs.attention_scaling)


@pytest.mark.parametrize("names,config,full", [
    (("gemma3", "Gemma3", "Gemma3TextConfig"), GEMMA_3_12B, 256),
    (("gemma4", "Gemma4Text", "Gemma4TextConfig"), GEMMA_4_12B, 512)], ids=["gemma3", "gemma4"])
def test_published_layer_types(names, config, full):
    theirs = rotary(*names, config["text_config"])
    again = json.loads(theirs.config.to_json_string(use_diff=False))        # as transformers 5 saves it
    for ours in (from_hf(config), from_hf(again)):
        widths = {layer: 2 * len(theta) for layer, (theta, _) in ours.items()}
        assert widths == {"full_attention": full, "sliding_attention": 256}
        for layer in widths:
            A = getattr(theirs, f"{layer}_attention_scaling")
            same(ours[layer], getattr(theirs, f"{layer}_inv_freq"), A)


def test_a_path_and_both_spellings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    new = {k: v for k, v in LLAMA_31_8B.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA_31_8B["rope_scaling"] | {"rope_theta": 500000.0}
    for config in (tmp_path / "config.json", str(tmp_path / "config.json"), new):
        assert torch.equal(from_hf(config)[0], from_hf(LLAMA_31_8B)[0])
    plain = {"hidden_size": 2048, "num_attention_heads": 32, "rope_theta": 1e4, "rope_scaling": None}
    assert from_hf(plain)[0].tolist() == pytest.approx([1e4 ** (-i / 32) for i in range(32)])
    partial = {"head_dim": 80, "rope_theta": 1e4, "partial_rotary_factor": 0.4}
    assert from_hf(partial)[0].tolist() == pytest.approx([1e4 ** (-i / 16) for i in range(16)])


# ------------------------------------------------------------------------------------------------------------
# to_hf

hot = RoPE(64)
hot.temperature = 1.3
EXPORTED = {
    "rope": (RoPE(64, 500_000.0), "default"), "prope": (PRoPE(64, 0.3), "proportional"),
    "nope": (PRoPE(64, 0.0), "proportional"), "lerope": (learned(), "longrope"),
    "extended": (extend(learned(), "yarn", 4, 256), "longrope"), "hot": (hot, "longrope"),
    "folded": (RoPE(64, theta=learned().theta().detach()), "longrope")}


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_logits_in_transformers(name):
    """transformers' float32 angles are off by up to 2^-24 x 2048 radians, and its logits with them."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    pe, kind = EXPORTED[name]
    params = json.loads(json.dumps(to_hf(pe, 1024)))                # what a file would hold
    assert params["rope_type"] == kind
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=192, num_attention_heads=3, rope_parameters=params,
                                              max_position_embeddings=1024))
    torch.manual_seed(0)
    q, k = torch.nn.functional.rms_norm(torch.randn(2, 2, 3, 2048, 64), (64,))      # (B, H, L, d) each
    for length, bound in ((512, 1e-4), (1024, 1e-3), (2048, 1e-3)):         # below, at and above trained
        pos, rows = torch.arange(length), slice(length - 64, length)        # late queries see every offset
        a, b = apply_rotary_pos_emb(q[:, :, :length], k[:, :, :length], *theirs(q, pos[None]))
        ours = logits(pe, q[:, :, :length], k[:, :, :length], pos)[..., rows, :]
        assert (a[:, :, rows] @ b.transpose(-1, -2) - ours).abs().max() / 64 ** 0.5 < bound


def test_export_of_alpha_is_its_table():
    pe = learned()
    params = to_hf(pe, 256)
    table = [math.exp(-a) for a in pe.alpha.tolist()]
    assert params["short_factor"] == params["long_factor"] == pytest.approx(table, rel=1e-12)
    assert params["attention_factor"] == 1 and params["original_max_position_embeddings"] == 256
    for length in (10, 10_000):
        theta, temperature = from_hf({"head_dim": 64, "rope_parameters": params}, length)
        torch.testing.assert_close(theta, pe.theta().detach(), rtol=1e-12, atol=0)
        assert temperature == 1


@pytest.mark.parametrize("d", [2, 6, 44, 46, 64, 88, 256])
def test_proportional_export_keeps_the_count_of_bands(d):
    """2 kept / d, read back as int(p d // 2), loses a band to rounding for some pairs, as 15 of 22."""
    for kept in range(d // 2 + 1):
        pe = PRoPE(d, min((2 * kept + 0.5) / d, 1))
        theta, _ = from_hf({"head_dim": d, "rope_parameters": to_hf(pe, 256)})
        assert (theta != 0).sum() == kept and torch.equal(theta, pe.theta())


# ------------------------------------------------------------------------------------------------------------
# what is wrong is told in a sentence that names it

THETA, L_KEY = frequencies(64), "original_max_position_embeddings"
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, L_KEY: 1024}
LLAMA = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, L_KEY: 1024, "short_factor": [1.0] * 32,
        "long_factor": [1.0] * 31}


def hf(length=None, max_position_embeddings=1024, **params):
    config = {"head_dim": 64, "max_position_embeddings": max_position_embeddings, "rope_parameters": params}
    return lambda: from_hf(config, length)


@pytest.mark.parametrize("call,said", [
    (lambda: scaling.linear(THETA, 0.5), "s = 0.5"),
    (lambda: scaling.linear(THETA, math.nan), "s = nan"),
    (lambda: scaling.ntk(THETA, math.inf), "s = inf"),
    (lambda: scaling.ntk(frequencies(2), 4), "d = 2"),
    (lambda: scaling.dynamic_ntk(frequencies(2), 4, 4096, 1024), "d = 2"),
    (lambda: scaling.dynamic_ntk(THETA, 4, -1, 1024), "length = -1"),
    (lambda: scaling.dynamic_ntk(THETA, 4, 100, 0), "trained = 0"),
    (lambda: scaling.ntk_by_parts(THETA, 4, 6), "L = 6"),
    (lambda: scaling.ntk_by_parts(THETA, 0, 1024), "s = 0"),
    (lambda: scaling.yarn(THETA, 4, 6, "index", 1e4), "L = 6"),
    (lambda: scaling.yarn(THETA, 4, 1024, "index"), "base = None"),
    (lambda: scaling.yarn(THETA, 4, 1024, "linear"), "ramp = 'linear'"),
    (lambda: scaling.yarn(THETA, 4, 1024, "index", 1e4, low=4, high=1), "high = 1"),
    (lambda: scaling.llama3(THETA, 4, 1024, 4, 1), "high = 1"),
    (lambda: scaling.llama3(THETA, 4, 1024, -1, 4), "low = -1"),
    (lambda: scaling.longrope(THETA, [1.0] * 31), "factors"),
    (lambda: scaling.longrope(THETA, [1.0] * 31 + [0.0]), "factors"),
    (lambda: scaling.longrope(THETA, None), "factors = None"),
    (lambda: scaling.yarn_temperature(0.5), "s = 0.5"),
    (lambda: extend(RoPE(64), "pi", 4, 256), "method = 'pi'"),
    (lambda: extend(RoPE(64), "linear", 0.5, 256), "s = 0.5"),
    (lambda: extend(RoPE(64), "linear", 4, -256), "L = -256"),
    (lambda: extend(RoPE(64), "ntk_by_parts", 4, 6.0), "L = 6"),
    (lambda: extend(RoPE(64), "longrope", 4, 256), "factors = None"),
    (lambda: extend(RoPE(64), "dynamic_ntk", 4, 256, length=-3), "length = -3"),
    (lambda: extend(RoPE(2), "ntk", 4, 256), "d = 2"),
    (hf(rope_type="su", rope_theta=1e4), "rope_type = 'su'"),
    (hf(rope_type="linear", rope_theta=1e4), "factor = None"),
    (hf(rope_type="linear", rope_theta=1e4, factor=0.25), "factor = 0.25"),
    (hf(rope_type="linear", rope_theta=1e4, factor="4"), "factor = '4'"),
    (hf(rope_type="default"), "rope_theta = None"),
    (hf(rope_type="default", rope_theta=0.5), "rope_theta = 0.5"),
    (hf(rope_type="default", rope_theta=1.0), "base = 1.0"),
    (hf(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.01), "partial_rotary_factor = 0.01"),
    (hf(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=1.5), "partial_rotary_factor = 1.5"),
    (hf(**DYNAMIC), "length = None"),
    (hf(-5, **DYNAMIC), "length = -5"),
    (hf(5, None, **DYNAMIC), "max_position_embeddings = None"),
    (hf(**YARN | {"factor": None}), "factor = None"),
    (hf(**YARN | {"attention_factor": -1.0}), "attention_factor = -1.0"),
    (hf(**YARN | {"beta_fast": 1, "beta_slow": 2}), "beta_fast = 1"),
    (hf(**YARN | {"beta_slow": 0}), "beta_slow = 0"),
    (hf(**YARN | {L_KEY: 6}), f"{L_KEY} = 6"),
    (hf(None, None, **YARN | {L_KEY: None}), f"{L_KEY} = None"),
    (hf(**LLAMA), "high_freq_factor = None"),
    (hf(**LLAMA, high_freq_factor=0.5), "high_freq_factor = 0.5"),
    (hf(**LONG), "length = None"),
    (hf(2000, **LONG), "long_factor"),
    (hf(1000, **LONG | {"short_factor": None}), "short_factor = None"),
    (lambda: from_hf({"rope_theta": 1e4}), "hidden_size = None"),
    (lambda: to_hf(PRoPE(64, 0.5, reverse=True), 256), "16 bands"),
    (lambda: to_hf(RoPE(64, theta=torch.rand(3, 32)), 256), "[3, 32]"),
    (lambda: to_hf(NDRoPE(64, 1, basis="exp"), 256), "no basis"),
    (lambda: to_hf(RoPE(64), 0), "L = 0"),
])
def test_a_bad_argument_is_a_sentence(call, said):
    with pytest.raises(ValueError) as e:
        call()
    message = str(e.value)
    assert said in message and "\n" not in message and len(message) < 200


def test_a_keyword_that_the_method_lacks_is_refused():
    with pytest.raises(TypeError, match="factors"):
        extend(RoPE(64), "linear", 4, 256, factors=FACTORS)
