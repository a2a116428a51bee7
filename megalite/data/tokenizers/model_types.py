"""Types of models, as config.json names them, and the class of tokenizer that transformers takes for each.

Types that are neither here nor known to transformers have the class that takes tokenizer.json as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

_OVERRULED = (
    "arctic camembertv2-base chatlm cohere_asr ernie4_5 ernie4_5_moe fuyu h2ovl_chat hyperclovax "
    "hyperclovax_vision_v2 hyperclovax_vlm internlm2 internlm3 iquestcoder jamba llava llava_next minicpm3 "
    "minicpmv minimax_m2 modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 opencua openvla paddleocr_vl "
    "phi3 phi3_v phimoe qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2 smolvlm step3_vl vipllava"
)
OVERRULED = frozenset(_OVERRULED.split())
"""Types whose class counts even if the folder names another one."""
CLASS_OF_MODEL: Mapping[str, str] = {
    kind: name
    for name, kinds in {
        "CohereTokenizer": "aya_vision cohere cohere2",
        "GemmaTokenizer": (
            "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 "
            "t5gemma zaya"
        ),
        "GPT2Tokenizer": (
            "blip-2 codegen dbrx emu3 gpt-sw3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo "
            "jais2 opt phi starcoder2"
        ),
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "LlamaTokenizer": "idefics idefics2",
        "Qwen2Tokenizer": (
            "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
            "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl "
            "qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice"
        ),
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    }.items()
    for kind in kinds.split()
}
"""The class for each type whose folder names none, if `folder_class` knows what the class builds."""
_OTHER_CLASSES = (
    "aimv2 albert align bark bart bert bert-generation big_bird biogpt blenderbot blenderbot-small blip "
    "bridgetower bros camembert canine chinese_clip clap clip clipseg clvp convbert cpmant ctrl data2vec-audio "
    "data2vec-text deberta deberta-v2 dia distilbert dpr electra encoder-decoder ernie esm esmc esmfold2 "
    "fastspeech2_conformer flaubert flava florence2 fnet fsmt funnel git gpt_neox_japanese granite_speech5_ctc "
    "grounding-dino groupvit gte hubert ibert jina_embeddings_v3 lasr_ctc lasr_encoder layoutlm layoutlmv2 "
    "layoutlmv3 layoutxlm led lilt longformer luke lxmert m2m_100 marian markuplm mbart megatron-bert "
    "metaclip_2 mgp-str mm-grounding-dino mobilebert mpnet mra mt5 musicgen musicgen_melody mvp nemotron3_5_asr "
    "nemotron_asr_streaming nllb-moe nomic_bert omdet-turbo omniasr_ctc oneformer openai-gpt owlv2 owlvit "
    "parakeet_ctc parakeet_rnnt parakeet_tdt pegasus perceiver plbart pp_formulanet prophetnet rag reformer "
    "rembert roberta roberta-prelayernorm roc_bert roformer sam3 sam3_video seamless_m4t seamless_m4t_v2 siglip "
    "siglip2 speech_to_text speecht5 splinter squeezebert switch_transformers t5 tapas tipsv2 trocr tvp udop "
    "unispeech unispeech-sat videoprism vilt visual_bert vits wav2vec2 wav2vec2-bert wav2vec2-conformer whisper "
    "xclip xglm xlm xlm-roberta xlnet xmod yoso"
)
OTHER_CLASSES = frozenset(_OTHER_CLASSES.split())
"""Types for which transformers takes a class of which too little is known here, if the folder names none."""
_AS_IS_MODELS = (
    "EvollaModel aria beam bigbird_pegasus canary flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe "
    "glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite granitemoe granitemoehybrid "
    "granitemoeshared kimi_k25 kimi_linear kosmos-2 mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7 "
    "ministral ministral3 mistral mistral3 mistral_large4 mixtral nemo_speechlm nystromformer olmo2 olmo3 "
    "olmo_hybrid omniasr pegasus_x persimmon pix2struct pixtral pocket_tts stablelm umt5 voxtral "
    "voxtral_realtime xlm-roberta-xl"
)
AS_IS_MODELS = (OVERRULED - CLASS_OF_MODEL.keys() - OTHER_CLASSES) | frozenset(_AS_IS_MODELS.split())
"""Types for which tokenizer.json is taken as it is, whatever class is named."""
