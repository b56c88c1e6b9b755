"use strict";
// Draws the charts of the page with Plotly, in the colours of the page, and redraws them when the colour scheme changes.
// A chart has `curves` over steps, or a `figure` of Plotly.
const charts = JSON.parse(document.getElementById("charts").textContent);
const plots = document.querySelectorAll(".plot");
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function layout() {
  const axis = {gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true, exponentformat: "e"};
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: "inherit", size: 12, color: colour("--text")},
    colorway: ["--first", "--second", "--third", "--fourth", "--fifth"].map(colour),
    margin: {l: 44, r: 8, t: 8, b: 36},
    height: 260,
    showlegend: true,
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0},
    hovermode: "x unified",
    hoverlabel: {bgcolor: colour("--card"), font: {color: colour("--text")}},
    xaxis: {...axis, title: {text: "step", standoff: 4}},
    yaxis: axis,
  };
}

function trace(curve) {
  return {
    type: "scatter",
    mode: curve.x.length > 60 ? "lines" : "lines+markers",
    name: curve.name,
    x: curve.x,
    y: curve.y,
    customdata: curve.epochs,
    hovertemplate: "%{y:.5g} (epoch %{customdata})<extra>" + curve.name + "</extra>",
  };
}

// Plotly's axis around a constant extends by 1 on both sides, where 0.001 looks like 0.
function around(values) {
  const numbers = new Set(values.filter(Number.isFinite));
  const [value] = numbers;
  return numbers.size === 1 && value ? [value - Math.abs(value) / 2, value + Math.abs(value) / 2] : null;
}

function figure(chart) {
  const common = layout();
  if (chart.curves) {
    const range = around(chart.curves.flatMap((curve) => curve.y));
    return [chart.curves.map(trace), {...common, yaxis: {...common.yaxis, ...(range && {range})}}];
  }
  const {data, layout: own} = structuredClone(chart.figure);
  const axes = {xaxis: {...common.xaxis, title: null, ...own.xaxis}, yaxis: {...common.yaxis, ...own.yaxis}};
  return [data, {...common, showlegend: false, hovermode: "closest", ...own, ...axes}];
}

function draw() {
  charts.forEach((chart, index) => {
    Plotly.react(plots[index], ...figure(chart), {responsive: true, displaylogo: false, displayModeBar: false});
  });
}

draw();
dark.addEventListener("change", draw);
