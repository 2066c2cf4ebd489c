"""Labels of the facts of a word in Chinese; in English a label is the fact's own name."""

from flowledger.show import explain_cuts, explain_settings, explain_words
from flowledger.tables.operators import ASPECTS

LABELS_ZH = {
    "purpose": "用途", "meaning": "含义", "forms": "形式", "dtype": "类型", "kind": "显存种类", "mask": "掩码",
    "producer": "产生", "also_written_by": "也产生于", "readers": "读取", "freed_by": "释放",
    "also_freed_by": "也释放于",
    "lifetime": "生命周期", "owner": "所有者", "placement": "放置", "variants": "变体",
    "common_bug": "常见错误", "aliases": "别名",
    "role": "角色", "phases": "相位", "reads": "读", "writes": "写", "frees": "释放", "works_on": "处理粒度",
    "aggregates": "聚合", "optional": "可选", "unit": "单位", "level": "层次", "healthy": "健康范围", "told_by": "超出时提示", "no_alarm": "不设告警",
    "used_by": "用于", "columns": "账本列", "algorithms": "算法",
    "is": "属于", "formula": "公式", "source": "来源", "chosen_by": "由此选择", "grain": "粒度", "inputs": "输入",
    "to_tokens": "如何落到 token", "needs": "需要", "settings": "相关设置", "surprise": "须知",
    **{aspect: zh for aspect, (_, zh) in ASPECTS.items() if aspect not in ("purpose", "mask")},
    **explain_cuts.LABELS_ZH,
    **explain_words.LABELS_ZH,
    **explain_settings.LABELS_ZH,
    "holds": "应当成立", "message": "消息", "fires_when": "触发条件", "bounds": "界限", "severity": "严重程度", "goal": "类别", "next_step": "下一步",
    "fires_at": "何时显现", "framework": "框架", "versions": "适用版本", "order": "所属排查", "expects": "应由此发现",
}  # fmt: skip

LISTED = {"needs", "keys", "algorithms", "axes", *ASPECTS, *explain_cuts.TWO_CUTS}  # a line for each entry
