"""The style sheet of the page: light and dark by the reader's system, one column on a narrow screen."""

# ruff: noqa: E501 - rules of a style sheet stand on one line

STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf7;--ink:#1d2227;--soft:#5b6570;--rule:#d9d6cf;--card:#fff;
--compute:#3b6ea5;--copy:#7fb2d6;--preparation:#e0a13a;--fetch:#c4503f;--accent:#2f7d5b;--note:#fff6e3}
@media(prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e7e9ea;--soft:#9aa5af;--rule:#333b43;--card:#1b2126;
--compute:#6ea3dc;--copy:#3f6f95;--preparation:#e3b15a;--fetch:#e0705f;--accent:#5fbf92;--note:#2b2616}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:15px;font-weight:600;color:var(--soft);margin:0 0 6px;overflow-wrap:anywhere}
.advice{font-size:clamp(21px,3.2vw,31px);line-height:1.28;font-weight:650;margin:0 0 14px;text-wrap:balance;max-width:32em}
.facts{color:var(--soft);margin:0 0 30px;font-size:14.5px;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 2px}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:20px 22px 18px;min-width:0}
section>p{color:var(--soft);margin:0 0 14px;font-size:14px}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:20px;margin-top:20px}
svg{display:block;width:100%;height:auto;max-width:600px;margin:0 auto}
.wide svg{max-width:760px}
.wide th,.wide td{padding-left:5px;padding-right:5px}
.wide table{font-size:13px}
.wide td:nth-child(2),.wide th:nth-child(2){text-align:left;color:var(--soft)}
svg text{fill:var(--ink);font:13px system-ui,sans-serif;font-variant-numeric:tabular-nums}
svg .tick{fill:var(--soft);font-size:12px}
svg .label{fill:var(--soft)}
svg .value{font-weight:600}
svg line.grid{stroke:var(--rule)}
svg .curve{fill:none;stroke:var(--compute);stroke-width:3;stroke-linejoin:round}
svg .column{fill:var(--compute)}
svg line.level{stroke-dasharray:5 4;stroke:var(--soft);stroke-width:1.5}
svg line.mark{stroke:var(--accent);stroke-width:2}
svg .compute{fill:var(--compute)}
svg .copy{fill:var(--copy)}
svg .preparation{fill:var(--preparation)}
svg .fetch{fill:var(--fetch)}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;margin:10px 0 14px;font-size:14px;justify-content:center}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}
.scroll{overflow-x:auto;margin-top:12px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--rule);white-space:nowrap}
th{color:var(--soft);font-weight:500}
th:first-child,td:first-child{text-align:left;padding-left:0}
th:last-child,td:last-child{padding-right:0}
tr:last-child td{border-bottom:0}
details{margin-top:10px}
summary{cursor:pointer;color:var(--soft);font-size:14px}
.notes{background:var(--note);border-radius:10px;padding:14px 18px 14px 34px;margin:20px 0 0;font-size:14.5px;overflow-wrap:anywhere}
footer{color:var(--soft);font-size:13.5px;margin-top:26px}
@media(max-width:760px){main{padding:24px 14px 40px}
.grid{grid-template-columns:minmax(0,1fr);gap:14px;margin-top:14px}
section{padding:16px 14px}
th,td{padding:5px 7px}
.wide td:nth-child(2),.wide th:nth-child(2){display:none}}
@media(max-width:760px){svg text,svg .label,svg .value{font-size:16px}
svg .tick{font-size:15px}}
"""
