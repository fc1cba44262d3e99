"""The report's style sheet. Light and dark follow the reader's system."""

STYLE = """
:root{--page:#f6f7f9;--card:#fff;--ink:#16191d;--soft:#5c6670;--rule:#e3e7eb;--edge:#d9dee4;
--s1:#2563c9;--s2:#d2691e;--s3:#2a8f5b;--s4:#8a63c7;--limit:#c02b3c}
@media (prefers-color-scheme:dark){:root{--page:#111418;--card:#1a1e24;--ink:#e8ebee;
--soft:#98a2ad;--rule:#2a3038;--edge:#2f3640;--s1:#6ea3f5;--s2:#f0985a;--s3:#5dc58d;
--s4:#b595ee;--limit:#f2707f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1240px;margin:0 auto;padding:32px 20px 48px}
header p{margin:0;color:var(--soft)}
h1{margin:0;font-size:26px;letter-spacing:-.01em}
h2{margin:36px 0 12px;font-size:18px}
h3{margin:0;font-size:14px;font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:22px 0}
.tiles div{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px 14px}
.tiles b{display:block;font-size:17px;white-space:nowrap;
font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.tiles span{color:var(--soft);font-size:12.5px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:10px;
padding:14px 16px 8px}
svg{display:block;width:100%;height:auto}
svg text{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule);stroke-width:1}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.limit{stroke:var(--limit);stroke-width:1.5;stroke-dasharray:5 4}
.band{opacity:.14;stroke:none}
.hover{fill:transparent}
.hover:hover{fill:var(--soft);fill-opacity:.12}
.s1.line{stroke:var(--s1)}.s2.line{stroke:var(--s2)}.s3.line{stroke:var(--s3)}
.s4.line{stroke:var(--s4)}
.s1.fill,.s1.band{fill:var(--s1)}.s2.fill,.s2.band{fill:var(--s2)}.s3.fill{fill:var(--s3)}
.s4.fill{fill:var(--s4)}
.keys{display:flex;flex-wrap:wrap;gap:2px 16px;margin:3px 0 6px;font-size:12.5px;color:var(--soft)}
.key b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.key i{display:inline-block;width:14px;height:0;margin-right:6px;vertical-align:middle;
border-top:2.5px solid}
i.area{height:9px;width:9px;border:0;border-radius:2px;background:currentColor}
i.s1{color:var(--s1)}i.s2{color:var(--s2)}i.s3{color:var(--s3)}i.s4{color:var(--s4)}
i.limit{color:var(--limit);border-top-style:dashed;border-top-width:1.5px}
.none{color:var(--soft)}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--edge);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;vertical-align:top;padding:7px 14px;border-bottom:1px solid var(--rule)}
tr:last-child>*{border-bottom:0}
thead th{color:var(--soft);font-weight:500;font-size:12.5px}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;
font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.samples td:first-child,.samples td:last-child{font-variant-numeric:tabular-nums}
.tables{margin-top:28px;display:grid;gap:10px}
details{background:var(--card);border:1px solid var(--edge);border-radius:10px}
summary{cursor:pointer;padding:10px 14px;font-weight:600}
details th{font-weight:500;color:var(--soft);width:36%}
details td{overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
footer{margin-top:28px;color:var(--soft);font-size:12.5px}
@media print{body{background:#fff}.charts{grid-template-columns:1fr 1fr}}
"""
