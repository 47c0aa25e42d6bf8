{{- define "tritune-model.name" -}}
{{- default .Release.Name .Values.fullnameOverride -}}
{{- end -}}

{{- define "tritune-model.labels" -}}
app.kubernetes.io/name: {{ include "tritune-model.name" . | quote }}
{{- end -}}
