{{- define "marserve.name" -}}
{{ .Values.fullnameOverride | default (printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-") }}
{{- end }}

{{/* Selectors of a Deployment cannot be changed, so they are those of TorchServe's chart. */}}
{{- define "marserve.selector" -}}
app: {{ include "marserve.name" . }}
{{- end }}

{{- define "marserve.labels" -}}
{{ include "marserve.selector" . }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "marserve.mount" -}}
{{ .Values.torchserve.pvd_mount | trimSuffix "/" }}
{{- end }}

{{- define "marserve.claimSize" -}}
{{ .Values.persistentVolume.size | default .Values.persitant_volume.size }}
{{- end }}

{{- define "marserve.claim" -}}
{{- if .Values.persistentVolume.name -}}
{{ .Values.persistentVolume.name }}
{{- else if include "marserve.claimSize" . -}}
{{ include "marserve.name" . }}-models
{{- end }}
{{- end }}

{{- define "marserve.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "marserve.name" .) }}
{{- end }}

{{/* Whether the ConfigMap has config.properties, and not the volume. */}}
{{- define "marserve.hasConfig" -}}
{{- if or .Values.config (not .Values.persistentVolume.name) (include "marserve.catalog" .) .Values.tokens.secret }}yes{{ end }}
{{- end }}

{{- define "marserve.configFile" -}}
{{- if include "marserve.hasConfig" . -}}
/home/model-server/config/config.properties
{{- else -}}
{{ include "marserve.mount" . }}/config/config.properties
{{- end }}
{{- end }}

{{/* What model_catalog= is to be; empty without one. */}}
{{- define "marserve.catalog" -}}
{{- with .Values.modelCatalog }}
{{- $ways := compact (list .place .configMap (ternary "content" "" (not (empty .content)))) }}
{{- if gt (len $ways) 1 }}{{ fail "modelCatalog: place, content and configMap exclude each other" }}{{ end }}
{{- if .place -}}
{{ .place }}
{{- else if $ways -}}
/home/model-server/catalog/catalog.json
{{- end }}
{{- end }}
{{- end }}

{{/* The ConfigMap that is mounted as the catalog's directory; empty where the catalog is elsewhere. */}}
{{- define "marserve.catalogMap" -}}
{{- if .Values.modelCatalog.configMap -}}
{{ .Values.modelCatalog.configMap }}
{{- else if .Values.modelCatalog.content -}}
{{ include "marserve.name" . }}-catalog
{{- end }}
{{- end }}

{{/* A value of config.properties: objects as JSON, no 6.5536e+06 for a number, long texts go on. */}}
{{- define "marserve.property" -}}
{{- if or (kindIs "map" .) (kindIs "slice" .) -}}
{{ toJson . }}
{{- else if kindIs "float64" . -}}
{{ if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- else -}}
{{ . | toString | trim | replace "\n" "\\\n" }}
{{- end }}
{{- end }}

{{- define "marserve.properties" -}}
{{- $keys := dict
  "inference_address" (printf "http://0.0.0.0:%v" .Values.torchserve.inference_port)
  "management_address" (printf "http://0.0.0.0:%v" .Values.torchserve.management_port)
  "metrics_address" (printf "http://0.0.0.0:%v" .Values.torchserve.metrics_port)
  "grpc_inference_address" "0.0.0.0"
  "grpc_inference_port" .Values.torchserve.grpc_inference_port
  "metrics_mode" "prometheus"
  "model_store" (printf "%s/model-store" (include "marserve.mount" .)) }}
{{- if include "marserve.catalog" . }}
{{- $_ := set $keys "model_catalog" (include "marserve.catalog" .) }}
{{- else if not (hasKey .Values.config "model_snapshot") }}
{{- $_ := set $keys "load_models" "all" }}
{{- end }}
{{- if .Values.tokens.secret }}
{{- $_ := set $keys "token_directory" "/home/model-server/tokens" }}
{{- else }}
{{- $_ := set $keys "disable_token_authorization" true }}
{{- end }}
{{- range $key, $value := mergeOverwrite $keys (deepCopy .Values.config) -}}
{{ $key }}={{ include "marserve.property" $value }}
{{ end }}
{{- end }}

{{/* Before Kubernetes kills the container: what it waits, and what the server allows itself, and 10 s. */}}
{{- define "marserve.grace" -}}
{{- if .Values.shutdown.graceSeconds -}}
{{ int .Values.shutdown.graceSeconds }}
{{- else -}}
{{- $config := .Values.config -}}
{{ add .Values.shutdown.delaySeconds (ceil (get $config "lame_duck_seconds" | default 0)) (ceil (get $config "drain_timeout" | default 30)) (ceil (get $config "stop_grace" | default 20)) 10 }}
{{- end }}
{{- end }}

{{/* Not empty where no request needs a token, as far as the chart knows. */}}
{{- define "marserve.isOpen" -}}
{{- if include "marserve.hasConfig" . -}}
{{- if regexMatch "(?m)^disable_token_authorization=true$" (include "marserve.properties" .) }}yes{{ end }}
{{- end }}
{{- end }}

{{- define "marserve.scheme" -}}
{{- $address := get .Values.config "inference_address" | default "" -}}
{{ .Values.probes.scheme | default (ternary "HTTPS" "HTTP" (hasPrefix "https:" $address)) }}
{{- end }}

{{- define "marserve.livenessPath" -}}
{{ .Values.probes.liveness.path | default (ternary "/ping" "/api-description" (not (empty (include "marserve.isOpen" .)))) }}
{{- end }}

{{/* A probe: its path, and the rest of what values.yaml says. */}}
{{- define "marserve.probe" -}}
httpGet:
  path: {{ .path | quote }}
  port: ts
  scheme: {{ .scheme }}
{{ toYaml (omit .probe "path") }}
{{- end }}
